"""The layer norm of V3.2's index keys: fp64, vLLM's own, and the relations of an op."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.blocks.layer_norm import index_layer_norm
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    norm_weight,
)

EPS = 1e-6
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def inputs(device: str, rows: int = 257) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = hazard_activations((rows, 128), seed=1, device=device)
    x[0], x[1] = -0.0, 3.0  # rows without variance
    weight = norm_weight(128, seed=2, device=device).float()
    bias = torch.randn(128, generator=torch.Generator().manual_seed(3)).to(device)
    return x, weight, bias


def bound(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(the formula in fp64, how far a program may be from it).

    One rounding to bf16, 2^-8 of a value; seven levels of sums, a division and a root in fp32
    before it: 32 * 2^-24 of the largest |x| over the deviation, and of the bias.
    """
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    deviation = (centered.square().mean(-1, keepdim=True) + EPS).sqrt()
    expected = centered / deviation * weight.double() + bias.double()
    reach = wide.abs().amax(-1, keepdim=True) / deviation * weight.double().abs() + bias.abs()
    return expected, expected.abs() * 2**-8 + reach * 32 * 2**-24


def test_index_layer_norm_matches_reference(device: str) -> None:
    args = inputs(device)
    expected, allowed = bound(*args)
    assert bool(((index_layer_norm(*args, EPS).double() - expected).abs() <= allowed).all())


def test_index_layer_norm_agrees_with_stock_vllm() -> None:
    """Both are within the bound of fp64, so at most twice the bound apart."""
    stock = pytest.importorskip("vllm.model_executor.layers.layernorm").LayerNorm
    x, weight, bias = inputs("cpu")
    norm = stock(128, eps=EPS)
    norm.weight.data.copy_(weight)
    norm.bias.data.copy_(bias)
    with torch.no_grad():
        theirs = norm(x).double()
    _, allowed = bound(x, weight, bias)
    difference = (index_layer_norm(x, weight, bias, EPS).double() - theirs).abs()
    assert bool((difference <= 2 * allowed).all())
    other = (index_layer_norm(x, weight, bias * 1.01, EPS).double() - theirs).abs()
    assert not bool((other <= 2 * allowed).all()), "control: another bias is out of bound"


def test_index_layer_norm_is_batch_invariant(device: str) -> None:
    x, weight, bias = inputs(device, 256)
    whole = index_layer_norm(x, weight, bias, EPS)
    for rows in BATCH_SIZES:
        for first in {0, max(0, 256 - rows)}:
            part = index_layer_norm(x[first : first + rows], weight, bias, EPS)
            assert_bitwise_equal(part, whole[first : first + rows], f"{rows} rows")
    strided = torch.cat((x, x), dim=1)[:, :128]
    assert_bitwise_equal(index_layer_norm(strided, weight, bias, EPS), whole)


def test_index_layer_norm_ignores_poison(device: str) -> None:
    x, weight, bias = inputs(device, 33)
    expected = index_layer_norm(x, weight, bias, EPS)
    x[7], x[20] = float("nan"), float("inf")
    kept = [row for row in range(33) if row not in (7, 20)]
    got = index_layer_norm(x, weight, bias, EPS)
    assert_bitwise_equal(got[kept], expected[kept])
    assert bool(got[[7, 20]].isnan().all())


def test_index_layer_norm_compiled_equals_eager(device: str) -> None:
    args = inputs(device, 33)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(
        lambda *given: index_layer_norm(*given, EPS), backend=backend, fullgraph=True
    )
    assert_bitwise_equal(compiled(*args), index_layer_norm(*args, EPS))


def test_control_the_other_order_of_the_sum_differs(device: str) -> None:
    x, weight, bias = inputs(device)
    x = x.float()  # the rounding to bf16 would hide it
    order = torch.arange(128, device=device).view(2, -1).t().flatten()
    turned = index_layer_norm(x[:, order], weight[order], bias[order], EPS)
    assert not bitwise_equal(turned, index_layer_norm(x, weight, bias, EPS)[:, order])
