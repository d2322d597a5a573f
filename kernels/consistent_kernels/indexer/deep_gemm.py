"""Index scores by DeepGEMM's `fp8_fp4_mqa_logits` and its paged form, out of vLLM's wheel.

Two kernels, whose sources (include/deep_gemm/impls/sm90_fp8_{,paged_}mqa_logits.cuh) do one
arithmetic: one product over 128 dimensions, four partial sums of weighted heads in one order, each
times the key's scale, then added. A probe shows on each machine that the two give the same bits; a
difference is a refusal.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from consistent_kernels.errors import UnsupportedError, invalid
from consistent_kernels.indexer.layout import row_stride
from consistent_kernels.indexer.spec import HEAD_DIM
from consistent_kernels.vendored import deep_gemm

PAGE_SIZE = 64
"""The only page that DeepGEMM reads on Hopper."""

HEADS = (32, 64, 128)
_PROBE_KEYS, _PROBE_QUERIES = 777, 257


@functools.cache
def _library() -> Any:
    return deep_gemm()


def _packed(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    return _library().fp8_fp4_mqa_logits(
        (q.contiguous(), None),
        (k.contiguous(), k_scale.contiguous()),
        weights.contiguous(),
        starts.to(torch.int32),
        ends.to(torch.int32),
        clean_logits=False,
    )


def _lens(context_lens: torch.Tensor) -> torch.Tensor:
    return context_lens.to(torch.int32)[:, None].contiguous()


def paged_schedule(context_lens: torch.Tensor) -> torch.Tensor:
    """Which multiprocessor takes which keys; see `indexer_schedule`."""
    library = _library()
    return library.get_paged_mqa_logits_metadata(
        _lens(context_lens), PAGE_SIZE, library.get_num_sms()
    )


def _paged(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    schedule: torch.Tensor | None,
    columns: int,
) -> torch.Tensor:
    """As vLLM's decode calls it: every query a request of its own, block_table [T, blocks]."""
    return _library().fp8_fp4_paged_mqa_logits(
        (q.contiguous()[:, None], None),
        cache[:, :, None],
        weights.contiguous(),
        _lens(context_lens),
        block_table,
        paged_schedule(context_lens) if schedule is None else schedule,
        columns,
        clean_logits=False,
    )


def _probe_bytes(count: int, salt: int, device: torch.device) -> torch.Tensor:
    """Hashed finite e4m3 bytes, the same on every machine."""
    index = torch.arange(count, dtype=torch.int64, device=device) + salt * 7919
    bits = (index * 2654435761) & 0xFFFFFFFF
    bits = (((bits ^ (bits >> 15)) * 2246822519) & 0xFFFFFFFF) >> 8
    return (bits % 0x7F | (bits >> 8 & 1) << 7).to(torch.uint8)


@functools.cache
def start(heads: int, device: torch.device) -> None:
    """Raise unless DeepGEMM serves this many heads with one set of bits; cached.

    The first use compiles both kernels (DeepGEMM keeps them on disk).

    Raises:
        UnsupportedError: heads, or paged and packed scores differ here.
    """
    if heads not in HEADS:
        raise UnsupportedError("indexer (deep_gemm)", f"{heads} heads", (*HEADS, "impl 'triton'"))
    keys, queries = _PROBE_KEYS, _PROBE_QUERIES
    fp8 = torch.float8_e4m3fn
    q = _probe_bytes(queries * heads * HEAD_DIM, 1, device).view(fp8).view(queries, heads, HEAD_DIM)
    k = _probe_bytes(keys * HEAD_DIM, 2, device)
    signs = _probe_bytes(queries * heads, 3, device).view(fp8).float().view(queries, heads)
    scale = _probe_bytes(keys, 4, device).view(fp8).float().abs() + 0.1
    pages = -(-keys // PAGE_SIZE)
    cache = torch.zeros((pages, PAGE_SIZE * 132), dtype=torch.uint8, device=device)
    padded = torch.zeros((pages * PAGE_SIZE, HEAD_DIM), dtype=torch.uint8, device=device)
    padded[:keys] = k.view(keys, HEAD_DIM)
    padded_scale = torch.zeros(pages * PAGE_SIZE, device=device, dtype=torch.float32)
    padded_scale[:keys] = scale
    cache[:, : PAGE_SIZE * HEAD_DIM] = padded.view(pages, -1)
    cache[:, PAGE_SIZE * HEAD_DIM :] = padded_scale.view(torch.uint8).view(pages, -1)
    table = torch.arange(pages, dtype=torch.int32, device=device).expand(queries, pages)
    ends = torch.arange(queries, dtype=torch.int32, device=device) * 3 + 5
    whole = _packed(q, signs, k.view(fp8).view(keys, HEAD_DIM), scale, torch.zeros_like(ends), ends)
    if whole.stride(0) != row_stride(keys, paged=False):
        raise UnsupportedError(
            "indexer (deep_gemm)",
            f"rows of {keys} scores lie {whole.stride(0)} apart",
            (f"{row_stride(keys, paged=False)}, as DeepGEMM of vLLM 0.25.1 lays them",),
        )
    seen = torch.arange(keys, device=device)[None] < ends[:, None]
    for rows in (slice(0, queries), slice(0, 1), slice(3, 5), slice(100, 164)):
        paged = _paged(
            q[rows], signs[rows], cache.view(pages, PAGE_SIZE, 132), table[rows].contiguous(),
            ends[rows], None, keys,
        )  # fmt: skip
        if paged.stride(0) != row_stride(keys, paged=True):
            raise UnsupportedError(
                "indexer (deep_gemm)",
                f"rows of {keys} scores from pages lie {paged.stride(0)} apart",
                (f"{row_stride(keys, paged=True)}, as DeepGEMM of vLLM 0.25.1 lays them",),
            )
        same = paged.contiguous().view(torch.int32) == whole[rows].contiguous().view(torch.int32)
        if not bool((same | ~seen[rows]).all()):
            raise UnsupportedError(
                "indexer (deep_gemm)",
                f"paged scores of {rows.stop - rows.start} queries have other bits than packed "
                f"scores of {queries} here",
                ("impl 'triton'",),
            )


def indexer_scores_deep_gemm(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Call the packed kernel; see `indexer_scores`."""
    start(q.shape[1], q.device)
    return _packed(q, weights, k, k_scale, starts, ends)


def indexer_scores_paged_deep_gemm(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor | None,
    context_lens: torch.Tensor,
    schedule: torch.Tensor | None,
    columns: int,
) -> torch.Tensor:
    """Call the paged kernel; see `indexer_scores_paged`."""
    if cache.shape[1] != PAGE_SIZE:
        raise invalid(
            "indexer_scores_paged", "block size", f"{PAGE_SIZE} for deep_gemm", cache.shape[1]
        )
    start(q.shape[1], q.device)
    tables = block_table[: len(q)] if requests is None else block_table[requests.to(torch.int64)]
    return _paged(q, weights, cache, tables, context_lens, schedule, columns)
