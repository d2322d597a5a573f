"""The FP8 caches beside vLLM's own kernels, on the same rows: the same bytes, the same reads."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from kv_cases import hazard_rows

from consistent_kernels.kv_cache_fp8 import (
    INDEXER,
    V4,
    V32,
    gather_indexer_k,
    gather_kv_fp8,
    new_cache,
    write_kv_fp8,
)
from consistent_kernels.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="vLLM's cache kernels need a CUDA device"
    ),
]

TOKENS, BLOCKS, SIZE = 257, 8, 64


def vllm_ops() -> ModuleType:
    ops = pytest.importorskip("vllm._custom_ops", reason="vLLM's kernels are the other side")
    if not hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
        pytest.skip("this build of vLLM has no CUDA kernels")
    return ops


def slots() -> torch.Tensor:
    chosen = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(1))[:TOKENS]
    chosen[5] = -1
    return chosen.cuda()


def test_v32_writes_and_reads_what_vllm_does() -> None:
    ops = vllm_ops()
    kv = hazard_rows(TOKENS, V32, seed=2, device="cuda")
    ours, stock = (new_cache(BLOCKS, SIZE, V32, "cuda") for _ in range(2))
    where = slots()
    write_kv_fp8(kv, ours, where, layout=V32, impl="triton")
    ops.concat_and_cache_mla(
        kv[:, :512].contiguous(),
        kv[:, 512:].contiguous(),
        stock,
        where,
        "fp8_ds_mla",
        torch.ones(1, device="cuda"),
    )
    assert_bitwise_equal(ours, stock)
    lengths = torch.tensor([300, 130], dtype=torch.int32, device="cuda")
    table = torch.tensor([[7, 0, 3, 5, 1], [2, 6, 4, 0, 0]], dtype=torch.int32, device="cuda")
    workspace = torch.empty(430, 576, dtype=torch.bfloat16, device="cuda")
    starts = torch.tensor([0, 300], dtype=torch.int32, device="cuda")
    ops.cp_gather_and_upconvert_fp8_kv_cache(stock, workspace, table, lengths, starts, 2)
    places = torch.arange(300, dtype=torch.int32, device="cuda").expand(2, 300).contiguous()
    places[1, 130:] = -1
    requests = torch.arange(2, dtype=torch.int32, device="cuda")
    rows = gather_kv_fp8(ours, places, requests, layout=V32, impl="triton", block_table=table)
    assert_bitwise_equal(torch.cat([rows[0], rows[1, :130]]), workspace)


def test_v4_writes_and_reads_what_vllm_does() -> None:
    vllm_ops()
    stock_ops = pytest.importorskip("vllm.models.deepseek_v4.common.ops.cache_utils")
    kv = hazard_rows(TOKENS, V4, seed=3, device="cuda")
    ours, stock = (new_cache(BLOCKS, SIZE, V4, "cuda") for _ in range(2))
    where = slots()
    write_kv_fp8(kv, ours, where, layout=V4, impl="triton")
    stock_ops.quantize_and_insert_k_cache(kv, stock.view(BLOCKS, -1), where, block_size=SIZE)
    # Stock takes log2 and the quotient by approximate instructions; these rows hold no group whose
    # scale lies within their error of a power of two, the exact powers included.
    assert_bitwise_equal(ours, stock)
    lengths = torch.tensor([300], dtype=torch.int32, device="cuda")
    table = torch.tensor([[7, 0, 3, 5, 1]], dtype=torch.int32, device="cuda")
    workspace = torch.empty(1, 300, 512, dtype=torch.bfloat16, device="cuda")
    stock_ops.dequantize_and_gather_k_cache_triton(
        workspace, stock.view(BLOCKS, SIZE, 584), lengths, None, table, SIZE, 0
    )
    places = torch.arange(300, dtype=torch.int32, device="cuda")[None]
    rows = gather_kv_fp8(
        ours, places, torch.zeros_like(lengths), layout=V4, impl="triton", block_table=table
    )
    assert_bitwise_equal(rows, workspace)


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
def test_indexer_writes_and_reads_what_vllm_does(scale_format: str) -> None:
    ops = vllm_ops()
    kv = hazard_rows(TOKENS, INDEXER, seed=4, device="cuda")
    ours, stock = (new_cache(BLOCKS, SIZE, INDEXER, "cuda") for _ in range(2))
    where = slots()
    write_kv_fp8(kv, ours, where, layout=INDEXER, impl="triton", scale_format=scale_format)
    ops.indexer_k_quant_and_cache(kv, stock, where, 128, scale_format)
    assert_bitwise_equal(ours, stock)
    k = torch.empty(300, 128, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty(300, 4, dtype=torch.uint8, device="cuda")
    table = torch.tensor([[7, 0, 3, 5, 1]], dtype=torch.int32, device="cuda")
    borders = torch.tensor([0, 300], dtype=torch.int32, device="cuda")
    ops.cp_gather_indexer_k_quant_cache(stock, k, scale, table, borders)
    places = torch.arange(300, dtype=torch.int32, device="cuda")[None]
    ours_k, ours_scale = gather_indexer_k(
        ours, places, torch.zeros(1, dtype=torch.int32, device="cuda"), block_table=table
    )
    assert torch.equal(ours_k[0].view(torch.uint8), k.view(torch.uint8))
    assert_bitwise_equal(ours_scale[0], scale.view(torch.float32)[:, 0].contiguous())
