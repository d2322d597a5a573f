"""The outputs of FlashAttention 3 for the key splits, merged in ascending order on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.attention.parameters import AttentionParameters

_LOWEST = tl.constexpr(-3.4028234663852886e38)
_NUM_WARPS = 4
_MERGED_HEADS = 8
"""Heads of a row that one program of a prefill's merge takes; moves no bit."""


@triton.jit
def _add_part(m, total, acc, part_m, part):
    """Merge one split's normalized output, of weight exp(part_m), into the running sums."""
    m_new = tl.maximum(m, part_m)
    ours, theirs = tl.exp(m - m_new), tl.exp(part_m - m_new)
    return m_new, total * ours + theirs, acc * ours + part * theirs


@triton.jit
def _write(out_ptr, lse_ptr, at, lse_at, columns, inside, m, total, acc, BLOCK_D: tl.constexpr):
    safe = tl.where(total > 0, total, 1.0)
    # + 0.0: the sign of an exact zero would follow keys that the row does not see.
    out = tl.div_rn(acc, tl.zeros((BLOCK_D,), tl.float32) + safe) + 0.0
    tl.store(out_ptr + at + columns, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + lse_at, tl.where(total > 0, m + tl.log(safe), float("-inf")))


@triton.jit(
    do_not_specialize=["batch", "splits", "tokens"],
    do_not_specialize_on_alignment=["lens_ptr", "cu_q_ptr"],
)
def _merge_decode_kernel(
    out_ptr,  # [T, Hq, D] contiguous
    lse_ptr,  # [Hq, T] fp32
    part_ptr,  # [B * splits, Hq, D]
    part_lse_ptr,  # [Hq, B * splits] fp32
    lens_ptr,  # [B] int32
    cu_q_ptr,  # [B + 1] int32
    batch,
    splits,
    tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(cu_q_ptr + request).to(tl.int64)
    if tl.load(cu_q_ptr + request + 1) > row:
        columns = tl.arange(0, BLOCK_D)
        inside = columns < HEAD_DIM
        keys = tl.load(lens_ptr + request)
        m = tl.full([], _LOWEST, tl.float32)
        total = tl.full([], 0.0, tl.float32)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        # Additions are a chain in split order; the loads of a few splits are in flight.
        for split in tl.range(0, tl.cdiv(keys, SPLIT), loop_unroll_factor=4):
            part = request * splits + split
            part_m = tl.load(part_lse_ptr + head.to(tl.int64) * batch * splits + part)
            value = tl.load(part_ptr + (part * HEADS + head) * HEAD_DIM + columns, mask=inside)
            m, total, acc = _add_part(m, total, acc, part_m, value.to(tl.float32))
        at = (row * HEADS + head) * HEAD_DIM
        lse_at = head.to(tl.int64) * tokens + row
        _write(out_ptr, lse_ptr, at, lse_at, columns, inside, m, total, acc, BLOCK_D)


@triton.jit
def _add_parts(m, total, acc, part_m, part):
    """`_add_part` of several heads: m, total, part_m [heads], acc, part [heads, D]."""
    m_new = tl.maximum(m, part_m)
    ours, theirs = tl.exp(m - m_new), tl.exp(part_m - m_new)
    return m_new, total * ours + theirs, acc * ours[:, None] + part * theirs[:, None]


@triton.jit(
    do_not_specialize=["batch", "tokens"],
    do_not_specialize_on_alignment=["lens_ptr", "cu_q_ptr"],
)
def _merge_prefill_kernel(
    out_ptr,  # [T, Hq, D] contiguous
    lse_ptr,  # [Hq, T] fp32
    own_ptr,  # [T, Hq, D], of the split that holds the query's own key
    own_lse_ptr,  # [Hq, T] fp32
    part_ptr,  # [splits - 1, T, Hq, D], of the splits before it
    part_lse_ptr,  # [splits - 1, Hq, T] fp32
    lens_ptr,  # [B] int32
    cu_q_ptr,  # [B + 1] int32
    batch,
    tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    # Some heads of one row: a program for each head would mostly wait for the row's lengths.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    low, high = 0, batch
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_q_ptr + middle) <= row:
            low = middle
        else:
            high = middle - 1
    if low < batch:
        columns = tl.arange(0, BLOCK_D)
        real = head < HEADS
        inside = real[:, None] & (columns < HEAD_DIM)[None, :]
        keys = tl.load(lens_ptr + low)
        position = keys - (tl.load(cu_q_ptr + low + 1) - row)
        own = tl.where(keys > 0, position // SPLIT, -1)
        m = tl.full((BLOCK_H,), _LOWEST, tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        at = (row * HEADS + head)[:, None] * HEAD_DIM + columns[None, :]
        lse_at = head * tokens.to(tl.int64) + row
        plane = tokens.to(tl.int64) * HEADS
        # Additions are a chain in split order; the loads of a few splits are in flight.
        for split in tl.range(0, own, loop_unroll_factor=2):
            part_m = tl.load(part_lse_ptr + split * plane + lse_at, mask=real, other=0.0)
            value = tl.load(part_ptr + split * plane * HEAD_DIM + at, mask=inside, other=0.0)
            m, total, acc = _add_parts(m, total, acc, part_m, value.to(tl.float32))
        if own >= 0:
            part_m = tl.load(own_lse_ptr + lse_at, mask=real, other=0.0)
            value = tl.load(own_ptr + at, mask=inside, other=0.0)
            m, total, acc = _add_parts(m, total, acc, part_m, value.to(tl.float32))
        safe = tl.where(total > 0, total, 1.0)
        # + 0.0: as in `_write`.
        out = tl.div_rn(acc, tl.zeros((BLOCK_H, BLOCK_D), tl.float32) + safe[:, None]) + 0.0
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
        lse = tl.where(total > 0, m + tl.log(safe), float("-inf"))
        tl.store(lse_ptr + lse_at, lse, mask=real)


def _outputs(q: torch.Tensor, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)


def _constants(params: AttentionParameters) -> dict[str, int]:
    return {
        "HEADS": params.num_heads,
        "HEAD_DIM": params.head_dim,
        "BLOCK_D": triton.next_power_of_2(params.head_dim),
        "SPLIT": params.key_split,
    }


def merge_decode(
    q: torch.Tensor,
    partial: torch.Tensor,
    part_lse: torch.Tensor,
    lens: torch.Tensor,
    cu_q: torch.Tensor,
    splits: int,
    params: AttentionParameters,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge [B * splits, Hq, D] of a decode step; returns (out [T, Hq, D], lse [Hq, T])."""
    out, lse = _outputs(q, out)
    batch = lens.shape[0]
    _merge_decode_kernel[(batch, params.num_heads)](
        out, lse, partial, part_lse, lens, cu_q, batch, splits, q.shape[0],
        **_constants(params), num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out, lse


def merge_prefill(
    q: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    partial: torch.Tensor,
    part_lse: torch.Tensor,
    lens: torch.Tensor,
    cu_q: torch.Tensor,
    params: AttentionParameters,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge each query's own split, ([T, Hq, D], [Hq, T]), with [splits - 1, T, Hq, D] before it.

    Returns:
        (out [T, Hq, D], lse [Hq, T]).
    """
    out, lse = _outputs(q, out)
    heads = min(_MERGED_HEADS, triton.next_power_of_2(params.num_heads))
    _merge_prefill_kernel[(q.shape[0], triton.cdiv(params.num_heads, heads))](
        out, lse, *own, partial, part_lse, lens, cu_q, lens.shape[0], q.shape[0],
        **_constants(params), BLOCK_H=heads, num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out, lse
