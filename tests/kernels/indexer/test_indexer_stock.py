"""The indexer's queries beside vLLM's two fused kernels: rotation, quantization, folded weights.

On a CPU their text is run by Triton's interpreter, without fused multiply-adds: equal bytes. On a
GPU the compiler joins a product and a sum of the rotation, so equal bytes are claimed where nothing
turns (position 0). Source: vllm/model_executor/layers/sparse_attn_indexer.py (V3.2),
vllm/models/deepseek_v4/common/ops/fused_indexer_q.py (V4).
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from indexer_cases import (
    FOLD,
    STOCK_FLOOR,
    STOCK_QUERIES,
    query_tables,
    stock_queries,
    turned_queries,
)
from interpreted import output_interpreted

from consistent_kernels.indexer import quantize_indexer_q
from consistent_kernels.testing import assert_bitwise_equal

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM's kernel is the other side"
)

INTERPRETED = """
import interpreted_fp8
import torch
from indexer_cases import (
    FOLD,
    STOCK_FLOOR,
    STOCK_QUERIES,
    query_tables,
    stock_queries,
    turned_queries,
)
from stock_kernels import load_stock_kernels
from consistent_kernels.indexer import quantize_indexer_q
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal

interpreted_fp8.install()
positions, q, weights = stock_queries("cpu")
tokens, heads, _ = q.shape
for name, (path, helpers) in STOCK_QUERIES.items():
    kernel = "_fused_indexer_q_rope_quant_kernel"
    stock = getattr(load_stock_kernels(path, *helpers, kernel), kernel)
    tables = query_tables("cpu")
    values = torch.empty_like(q, dtype=torch.float8_e4m3fn)
    folded = torch.empty(tokens, heads)
    if name == "v32":
        stock[(tokens, heads)](
            positions, q, q.stride(0), q.stride(1), tables, tables.stride(0),
            values, values.stride(0), values.stride(1), weights, *weights.stride(),
            folded, *folded.stride(), FOLD["softmax_scale"], FOLD["head_scale"],
            fp8_min=-448.0, fp8_max=448.0, is_neox=True,
        )
    else:
        stock[(tokens, heads)](
            positions, q, q.stride(0), q.stride(1), tables, tables.stride(0), 32,
            values, values.stride(0), values.stride(1), 128, weights, weights.stride(0),
            FOLD["softmax_scale"], FOLD["head_scale"], folded, folded.stride(0),
        )
    turned = turned_queries(name, positions, q, "reference")
    ours, ours_folded = quantize_indexer_q(turned, weights, impl="reference", **FOLD)
    rows = turned.float().abs().amax(-1) >= STOCK_FLOOR[name]
    assert not bool(rows.all())
    assert_bitwise_equal(ours_folded[rows], folded[rows], name)
    assert_bitwise_equal(ours.view(torch.uint8)[rows], values.view(torch.uint8)[rows], name)
    small = ours.float() * ours_folded[..., None] - values.float() * folded[..., None]
    step = weights.float().abs()[..., None] * FOLD["softmax_scale"] * FOLD["head_scale"]
    # Both sides lie half a step of the coarser grid from the value: 2^-4 of it, or 2^-10 of the
    # scale, which is 2^-22 where V4 has its floor.
    assert bool((small.abs() <= step * (turned.float().abs() * 2**-3 + 2**-31)).all())
    # Controls: queries turned by one position more, and weights folded in another order.
    late = turned_queries(name, positions + 1, q, "reference")
    wrong, _ = quantize_indexer_q(late, weights, impl="reference", **FOLD)
    assert not bitwise_equal(wrong.view(torch.uint8)[rows], values.view(torch.uint8)[rows])
    fused = {"softmax_scale": FOLD["softmax_scale"] * FOLD["head_scale"], "head_scale": 1.0}
    _, other = quantize_indexer_q(turned, weights, impl="reference", **fused)
    assert not bitwise_equal(other[rows], folded[rows])
print("same")
"""


@needs_vllm
def test_quantize_indexer_q_equals_stock_interpreted() -> None:
    assert output_interpreted(INTERPRETED).strip() == "same"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's kernels need a CUDA device")
@pytest.mark.parametrize("name", STOCK_QUERIES)
def test_quantize_indexer_q_agrees_with_stock(name: str) -> None:
    path = STOCK_QUERIES[name][0].removesuffix(".py").replace("/", ".")
    stock = pytest.importorskip(f"vllm.{path}").fused_indexer_q_rope_quant
    positions, q, weights = stock_queries("cuda")
    neox = (True,) if name == "v32" else ()
    for at in (torch.zeros_like(positions), positions):
        values, folded = stock(at, q, query_tables("cuda"), weights, *FOLD.values(), *neox)
        turned = turned_queries(name, at, q, "triton")
        ours, ours_folded = quantize_indexer_q(turned, weights, impl="triton", **FOLD)
        rows = turned.float().abs().amax(-1) >= STOCK_FLOOR[name]
        if not bool(at.any()):
            assert_bitwise_equal(ours_folded[rows], folded[rows])
            assert_bitwise_equal(ours.view(torch.uint8)[rows], values.view(torch.uint8)[rows])
        same = ours.view(torch.uint8)[rows] == values.view(torch.uint8)[rows]
        # A fused product moves a bf16 result in one of some hundred places, by one step.
        assert float((~same).float().mean()) < 2**-6
        mine = ours.float()[rows] * ours_folded[rows][..., None]
        theirs = values.float()[rows] * folded[rows][..., None]
        largest = mine.abs().amax(-1, keepdim=True)
        assert bool(((mine - theirs).abs() <= mine.abs() * 2**-3 + largest * 2**-9).all())
