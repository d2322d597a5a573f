"""Around FlashAttention 3: which rows and keys each key split takes, and the ordered merge.

All of it is computed on the device: nothing here reads a length on the host.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from consistent_kernels.attention.parameters import AttentionParameters

LOWEST = tl.constexpr(-3.4028234663852886e38)
_NUM_WARPS = 4


@dataclasses.dataclass(frozen=True)
class DecodeSplits:
    """Every (request, split) as a sequence of at most one query, request-major.

    Attributes:
        q: [B * splits, Hq, D], each request's query repeated.
        rows: [B * splits + 1] int32, 0, 1, 2, ...
        used_q: [B * splits] int32, 1 where the split has keys of a request with a query.
        lens: [B * splits] int32 keys.
        starts: [B * splits + 1] int32 first key rows (packed), or None.
        table: [B * splits, blocks of a split] int32 (pages), or None.
    """

    q: torch.Tensor
    rows: torch.Tensor
    used_q: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor | None
    table: torch.Tensor | None


def decode_splits(
    q: torch.Tensor,
    lens: torch.Tensor,
    starts: torch.Tensor | None,
    table: torch.Tensor | None,
    cu_q: torch.Tensor,
    splits: int,
    params: AttentionParameters,
    k: torch.Tensor,
) -> DecodeSplits:
    """Return the sequences of a decode step; `k` tells the page size."""
    batch, size = lens.shape[0], params.key_split
    split = torch.arange(splits, device=q.device, dtype=torch.int32)
    keys = (lens[:, None] - split * size).clamp(0, size)
    has_query = (cu_q[1:] > cu_q[:-1]).to(torch.int32)[:, None]
    used_q = (keys > 0).to(torch.int32) * has_query
    row = cu_q[:-1].clamp(max=q.shape[0] - 1)
    repeated = q.index_select(0, row).repeat_interleave(splits, 0)
    rows = torch.arange(batch * splits + 1, device=q.device, dtype=torch.int32)
    first, blocks = None, None
    if table is None:
        first = torch.zeros(batch * splits + 1, device=q.device, dtype=torch.int32)
        first[:-1] = (starts[:-1, None] + split * size).flatten()
    else:
        in_split = size // k.shape[1]
        index = torch.arange(splits * in_split, device=q.device).clamp(max=table.shape[1] - 1)
        blocks = table.index_select(1, index).view(batch * splits, in_split)
    return DecodeSplits(repeated, rows, used_q.flatten(), keys.flatten(), first, blocks)


@dataclasses.dataclass(frozen=True)
class PrefillRanges:
    """For each split the queries inside it ([0]) and behind it ([1]).

    Attributes:
        rows: [2, splits, B + 1] int32 first query rows.
        used_q: [2, splits, B] int32 queries.
        lens: [2, splits, B] int32 keys that the last of them sees in the split.
        starts: [splits, B + 1] int32 first key rows (packed), or None.
    """

    rows: torch.Tensor
    used_q: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor | None


def prefill_ranges(
    lens: torch.Tensor,
    starts: torch.Tensor | None,
    cu_q: torch.Tensor,
    splits: int,
    size: int,
) -> PrefillRanges:
    """Return the query and key ranges of each split of `size` keys."""
    begin = torch.arange(splits, device=lens.device, dtype=torch.int32)[:, None] * size
    queries = cu_q[1:] - cu_q[:-1]
    # A padded request has queries and no keys; it takes part in no split.
    queries = torch.where(lens > 0, queries, 0)
    position = lens - queries
    low = (begin - position).clamp(min=0).minimum(queries)
    high = (begin + size - position).clamp(min=0).minimum(queries)
    inside, behind = high - low, queries - high
    keys_inside = torch.where(inside > 0, position + high - begin, 0)
    keys_behind = torch.where(behind > 0, size, 0).expand_as(keys_inside)
    first = torch.stack((low, high)) + cu_q[:-1]
    rows = torch.nn.functional.pad(first, (0, 1))
    key_rows = None
    if starts is not None:
        key_rows = torch.nn.functional.pad(starts[:-1] + begin, (0, 1))
    return PrefillRanges(
        rows.to(torch.int32),
        torch.stack((inside, behind)).to(torch.int32),
        torch.stack((keys_inside, keys_behind)).to(torch.int32),
        key_rows,
    )


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
        m = tl.full([], LOWEST, tl.float32)
        total = tl.full([], 0.0, tl.float32)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        for split in range(tl.cdiv(keys, SPLIT)):
            part = request * splits + split
            part_m = tl.load(part_lse_ptr + head.to(tl.int64) * batch * splits + part)
            value = tl.load(part_ptr + (part * HEADS + head) * HEAD_DIM + columns, mask=inside)
            m, total, acc = _add_part(m, total, acc, part_m, value.to(tl.float32))
        at = (row * HEADS + head) * HEAD_DIM
        lse_at = head.to(tl.int64) * tokens + row
        _write(out_ptr, lse_ptr, at, lse_at, columns, inside, m, total, acc, BLOCK_D)


@triton.jit(
    do_not_specialize=["batch", "splits", "tokens"],
    do_not_specialize_on_alignment=["lens_ptr", "cu_q_ptr"],
)
def _merge_prefill_kernel(
    out_ptr,  # [T, Hq, D] contiguous
    lse_ptr,  # [Hq, T] fp32
    part_ptr,  # [splits, T, Hq, D]
    part_lse_ptr,  # [2, splits, Hq, T] fp32
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
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    low, high = 0, batch
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_q_ptr + middle) <= row:
            low = middle
        else:
            high = middle - 1
    if low < batch:
        columns = tl.arange(0, BLOCK_D)
        inside = columns < HEAD_DIM
        keys = tl.load(lens_ptr + low)
        position = keys - (tl.load(cu_q_ptr + low + 1) - row)
        own = tl.where(keys > 0, position // SPLIT, -1)
        m = tl.full([], LOWEST, tl.float32)
        total = tl.full([], 0.0, tl.float32)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        at = (row * HEADS + head) * HEAD_DIM
        lse_at = head * tokens + row
        plane = tokens.to(tl.int64) * HEADS
        for split in range(own + 1):
            behind = tl.where(split < own, splits, 0).to(tl.int64)
            part_m = tl.load(part_lse_ptr + (behind + split) * plane + lse_at)
            part_at = split.to(tl.int64) * plane * HEAD_DIM + at
            value = tl.load(part_ptr + part_at + columns, mask=inside, other=0.0)
            m, total, acc = _add_part(m, total, acc, part_m, value.to(tl.float32))
        _write(out_ptr, lse_ptr, at, lse_at, columns, inside, m, total, acc, BLOCK_D)


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
    partial: torch.Tensor,
    part_lse: torch.Tensor,
    lens: torch.Tensor,
    cu_q: torch.Tensor,
    params: AttentionParameters,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge [splits, T, Hq, D]; returns (out [T, Hq, D], lse [Hq, T])."""
    out, lse = _outputs(q, out)
    _merge_prefill_kernel[(q.shape[0], params.num_heads)](
        out, lse, partial, part_lse, lens, cu_q, lens.shape[0], partial.shape[0], q.shape[0],
        **_constants(params), num_warps=_NUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out, lse
