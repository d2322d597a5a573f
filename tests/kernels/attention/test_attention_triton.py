"""The Triton program of attention: compiled for GPUs that are not here, interpreted, captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_cases import CASES, Batch, borders, fill_pages, make_batch
from interpreted import output_interpreted

from consistent_kernels.attention import attention_paged
from consistent_kernels.attention.spec import (
    BLOCK_ROWS,
    KEY_TILE,
    NUM_STAGES,
    NUM_WARPS,
    query_slots,
)
from consistent_kernels.testing import assert_bitwise_equal
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the Triton program needs a CUDA device"
)

POINTERS = {
    "bf16": ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "k_cache_ptr", "v_cache_ptr"),
    "fp32": (
        *("lse_ptr", "part_acc_ptr", "part_m_ptr", "part_l_ptr"),
        *("carry_acc_ptr", "carry_m_ptr", "carry_l_ptr"),
    ),
    "i32": ("table_ptr", "lens_ptr", "cu_q_ptr"),
    "i64": ("slot_ptr",),
}


def signature_of(kernel: object, constexprs: dict[str, int]) -> dict[str, str]:
    pointers = {name: f"*{kind}" for kind, names in POINTERS.items() for name in names}
    arguments = [name for name in kernel.arg_names if name not in constexprs]
    return {name: pointers.get(name, "fp32" if name == "scale" else "i32") for name in arguments}


def constants_of(group: int, head_dim: int) -> dict[str, int]:
    return {
        "HEADS": 2 * group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": 1 << (head_dim - 1).bit_length(),
        "SLOTS": query_slots(group, BLOCK_ROWS),
        "KEY_TILE": KEY_TILE,
        "SPLIT_TILES": 64,
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])  # 96 is padded to 128 like 80
def test_attention_cross_compiles(arch: int, head_dim: int) -> None:
    from consistent_kernels.attention.triton import _attention_fwd_kernel

    constexprs = constants_of(3, head_dim) | {"GROUP": 3, "BLOCK_ROWS": BLOCK_ROWS}
    cubin = cross_compile(
        _attention_fwd_kernel,
        arch=arch,
        signature=signature_of(_attention_fwd_kernel, constexprs),
        constexprs=constexprs,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_merge_and_write_cross_compile(arch: int) -> None:
    from consistent_kernels.attention.triton import _attention_merge_kernel, _write_kv_kernel

    for kernel, constexprs in (
        (_attention_merge_kernel, constants_of(3, 80)),
        (_write_kv_kernel, {"WIDTH": 240, "BLOCK": 256}),
    ):
        cubin = cross_compile(
            kernel, arch=arch, signature=signature_of(kernel, constexprs), constexprs=constexprs
        )
        assert cubin.startswith(b"\x7fELF")


INTERPRETED = """
import torch
from attention_cases import borders, fill_pages, make_batch
from consistent_kernels.attention import AttentionParameters, attention_varlen
from consistent_kernels.attention import triton as program
from consistent_kernels.testing import assert_bitwise_equal

rows, cu_q, cu_k = [0, 1, *range(124, 134)], borders([2, 10]), borders([2, 132])
for params in (
    AttentionParameters(2, 1, 64, 0.125, None, 64), AttentionParameters(3, 1, 80, 0.1, 70, 64)
):
    batch = make_batch(params, "triton", "cpu", lengths=(2, 132), dtype=torch.float16)
    attend = lambda impl: attention_varlen(
        batch.q[rows], batch.k, batch.v, cu_q, cu_k, params=params, impl=impl
    )
    out, lse = attend("triton")
    expected, expected_lse = attend("reference")
    # Both round P and the result to fp16 (2^-11 each); sums differ in fp32 order only.
    bound = 4 * 2**-11 * float(batch.v.abs().max())
    assert float((out.float() - expected.float()).abs().max()) <= bound
    assert float((lse - expected_lse).abs().max()) <= 1e-4
    program.WORKSPACE_BYTES = 1  # one split a launch: the merge goes through the carry
    again = attend("triton")
    assert_bitwise_equal(again[0], out)
    assert_bitwise_equal(again[1], lse)
    program.WORKSPACE_BYTES = 1 << 28
    pages = fill_pages(batch)
    paged, paged_lse, _ = pages.attend([(1, 125, 132), (0, 1, 2)], padded_rows=1)
    same = [*range(5, 12), 1]
    assert_bitwise_equal(paged[:-1], out[same])
    assert_bitwise_equal(paged_lse[:-1], lse[same])
    assert not bool(paged[-1].any())
print("same")
"""


def test_attention_interpreted_matches_reference() -> None:
    # Triton's interpreter runs the kernels in NumPy (fp16: it takes bf16 for integers): addresses,
    # masks, splits and merges, not the bits of a GPU.
    assert output_interpreted(INTERPRETED).strip() == "same"


def decode_steps(batch: Batch) -> Iterator[list[tuple[int, int, int]]]:
    for t in (0, 14, 15, 16, 63, 64, 127, 128, 299):
        yield [(i, t, t + 1) for i, n in enumerate(batch.lengths) if n > t]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["smollm2", "qwen2-split128", "gqa128-split128"])
def test_attention_graph_replay_equals_eager(name: str) -> None:
    """A full graph of 16 rows serves any batch up to 16; unused rows have no keys."""
    batch = make_batch(CASES[name], "triton", "cuda")
    pages = fill_pages(batch)
    width = pages.block_table.shape[1]
    q = torch.zeros(16, *batch.q.shape[1:], dtype=batch.q.dtype, device="cuda")
    table = torch.full((16, width), 2**30, dtype=torch.int32, device="cuda")
    seq_lens = torch.zeros(16, dtype=torch.int32, device="cuda")
    cu = torch.arange(17, dtype=torch.int32, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return attention_paged(
            q,
            pages.k_cache,
            pages.v_cache,
            table,
            seq_lens,
            cu,
            params=batch.params,
            impl="triton",
            max_query_len=1,
            max_seq_len=300,
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for parts in decode_steps(batch):
        eager_out, eager_lse, rows = pages.attend(parts)
        count = rows.numel()
        q.fill_(float("nan"))
        q[:count] = batch.q[rows]
        table.fill_(2**30)
        table[:count] = pages.block_table[[i for i, _, _ in parts]]
        seq_lens.zero_()
        seq_lens[:count] = torch.tensor([end for _, _, end in parts], dtype=torch.int32)
        graph.replay()
        assert_bitwise_equal(out[:count], eager_out)
        assert_bitwise_equal(lse[:count], eager_lse)
        assert_bitwise_equal(out[count:], torch.zeros_like(out[count:]))


@pytest.mark.gpu
@needs_cuda
def test_attention_has_one_binary() -> None:
    """Prefill, chunks, decode, packed and paged run the same compiled kernel."""
    from consistent_kernels.attention.triton import _attention_fwd_kernel

    batch = make_batch(CASES["gqa128-split128"], "triton", "cuda")
    cache = _attention_fwd_kernel.device_caches[torch.cuda.current_device()][0]
    batch.attend()
    known = set(cache)
    pages = fill_pages(batch, block_size=128)
    for parts in ([(9, 299, 300)], [(9, 16, 80), (0, 0, 1)], [(8, 0, 129)]):
        pages.attend(parts, padded_rows=3)
    batch.attend([9, 0])
    assert set(cache) == known


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["smollm2", "gqa256-window100-split128"])
def test_attention_splits_in_flight_keep_the_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from consistent_kernels.attention import triton as program

    batch = make_batch(CASES[name], "triton", "cuda")
    expected = batch.attend()
    for size in (1, 3 << 20):
        monkeypatch.setattr(program, "WORKSPACE_BYTES", size)
        for actual, whole in zip(batch.attend(), expected, strict=True):
            assert_bitwise_equal(actual, whole)


@pytest.mark.gpu
@needs_cuda
def test_attention_rows_beyond_2_to_the_31_elements() -> None:
    """Pages whose offsets need 64 bits give the bits of a small cache."""
    batch = make_batch(CASES["gqa256-window100-split128"], "triton", "cuda", lengths=(200,))
    small = fill_pages(batch)
    expected, _, rows = small.attend([(0, 0, 200)])
    block_elements = small.k_cache[0].numel()
    blocks = 2**31 // block_elements + 64
    table = small.block_table.clone()
    moved = torch.arange(blocks - 13, blocks, device="cuda", dtype=torch.int32)
    caches = []
    for cache in (small.k_cache, small.v_cache):
        large = torch.zeros(blocks, *cache.shape[1:], dtype=cache.dtype, device="cuda")
        large[moved.long()] = cache[table[0, :13].long()]
        caches.append(large)
    table[0, :13] = moved
    out, _ = attention_paged(
        batch.q[rows],
        *caches,
        table,
        torch.tensor([200], dtype=torch.int32, device="cuda"),
        borders([200], "cuda"),
        params=batch.params,
        impl="triton",
        max_query_len=200,
        max_seq_len=200,
    )
    assert_bitwise_equal(out, expected)
