"""Counting logits in Triton: integers, so that the order of additions moves nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 8192
_NUM_WARPS = 8


@triton.jit(
    do_not_specialize=["stride", "vocab"],
    do_not_specialize_on_alignment=["ids_ptr"],  # a request's part of all prompts' tokens
)
def _count_at_least_kernel(
    count_ptr,  # [rows] int64, zeros
    logits_ptr,  # [rows, V] fp32, row stride stride
    ids_ptr,  # [rows] int64
    stride,
    vocab,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    own = tl.load(logits_ptr + tl.load(ids_ptr + row))
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + at, mask=at < vocab, other=float("nan"))
    tl.atomic_add(count_ptr + row, tl.sum((logits >= own).to(tl.int32), 0).to(tl.int64))


def count_at_least(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Launch the kernel; logits [T, V] fp32 with contiguous rows, ids [T] int64 -> [T] int64."""
    rows, vocab = logits.shape
    count = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _count_at_least_kernel[(rows, triton.cdiv(vocab, _TILE))](
            count, logits, ids, logits.stride(0), vocab, TILE=_TILE, num_warps=_NUM_WARPS
        )
    return count
