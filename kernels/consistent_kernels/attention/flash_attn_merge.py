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
_MERGED_HEADS = 8
"""Heads of a row that one program of a prefill's merge takes; moves no bit."""


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
    """Return the sequences of a decode step, in one launch; `k` tells the page size."""
    count = lens.shape[0] * splits
    q = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()
    repeated = torch.empty((count, *q.shape[1:]), dtype=q.dtype, device=q.device)
    sizes = (count + 1, count + 1, count, count)
    rows, first, used_q, keys = (
        torch.empty(size, dtype=torch.int32, device=q.device) for size in sizes
    )
    blocks, in_split = lens, 1
    if table is not None:
        in_split = params.key_split // k.shape[1]
        blocks = torch.empty((count, in_split), dtype=torch.int32, device=q.device)
    width = q.shape[1] * q.shape[2]
    _decode_splits_kernel[(count,)](
        q,
        lens,
        cu_q,
        lens if starts is None else starts,
        lens if table is None else table,
        repeated,
        rows,
        used_q,
        keys,
        first,
        blocks,
        q.stride(0),
        0 if table is None else table.stride(0),
        0 if table is None else table.shape[1],
        splits,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        SPLIT=params.key_split,
        IN_SPLIT=in_split,
        IN_BLOCK=triton.next_power_of_2(in_split),
        PAGED=table is not None,
        num_warps=_NUM_WARPS,
    )
    if table is None:
        return DecodeSplits(repeated, rows, used_q, keys, first, None)
    return DecodeSplits(repeated, rows, used_q, keys, None, blocks)


@triton.jit(
    do_not_specialize=["q_stride", "table_stride", "table_width", "splits"],
    do_not_specialize_on_alignment=["q_ptr", "lens_ptr", "cu_q_ptr", "starts_ptr", "table_ptr"],
)
def _decode_splits_kernel(
    q_ptr,  # [T, WIDTH], row stride q_stride
    lens_ptr,  # [B] int32
    cu_q_ptr,  # [B + 1] int32
    starts_ptr,  # [B + 1] int32 or unused
    table_ptr,  # [B, table_width] int32, row stride table_stride, or unused
    repeated_ptr,  # [B * splits, WIDTH]
    rows_ptr,  # [B * splits + 1] int32
    used_q_ptr,  # [B * splits] int32
    keys_ptr,  # [B * splits] int32
    first_ptr,  # [B * splits + 1] int32 or unused
    blocks_ptr,  # [B * splits, IN_SPLIT] int32 or unused
    q_stride,
    table_stride,
    table_width,
    splits,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    IN_SPLIT: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
):
    at = tl.program_id(0)
    request, split = at // splits, at % splits
    row = tl.load(cu_q_ptr + request).to(tl.int64)
    has_query = tl.load(cu_q_ptr + request + 1) > row
    keys = tl.load(lens_ptr + request) - split * SPLIT
    keys = tl.minimum(tl.maximum(keys, 0), SPLIT)
    used = has_query & (keys > 0)
    tl.store(rows_ptr + at, at)
    tl.store(used_q_ptr + at, used.to(tl.int32))
    tl.store(keys_ptr + at, keys)
    if not PAGED:
        tl.store(first_ptr + at, tl.load(starts_ptr + request) + split * SPLIT)
    if at == tl.num_programs(0) - 1:
        tl.store(rows_ptr + at + 1, at + 1)
        if not PAGED:
            tl.store(first_ptr + at + 1, 0)
    if used:
        column = tl.arange(0, BLOCK)
        value = tl.load(q_ptr + row * q_stride + column, mask=column < WIDTH)
        tl.store(repeated_ptr + at.to(tl.int64) * WIDTH + column, value, mask=column < WIDTH)
        if PAGED:
            page = tl.arange(0, IN_BLOCK)
            source = split * IN_SPLIT + page
            inside = (page < IN_SPLIT) & (source < table_width)
            table_row = table_ptr + request.to(tl.int64) * table_stride
            block = tl.load(table_row + source, mask=inside, other=0)
            tl.store(blocks_ptr + at.to(tl.int64) * IN_SPLIT + page, block, mask=page < IN_SPLIT)


@dataclasses.dataclass(frozen=True)
class PrefillSplits:
    """The queries inside each split, as sequences, and those behind it.

    Attributes:
        rows: [B * splits + 1] int32 first query rows of (request, split), request-major; used_q,
            lens: [B * splits] int32 queries inside the split, and keys that the last of them sees
            there; starts: [B * splits + 1] int32 first key rows (packed), or None; table:
            [B * splits, blocks of a split] int32 (pages), or None.
        behind_rows: [splits - 1, B + 1] int32 first query rows behind each split but the last;
            behind_used_q, behind_lens: [splits - 1, B] int32 queries, and keys: all of the split;
            behind_starts: [splits - 1, B + 1] int32 (packed), or None.
    """

    rows: torch.Tensor
    used_q: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor | None
    table: torch.Tensor | None
    behind_rows: torch.Tensor
    behind_used_q: torch.Tensor
    behind_lens: torch.Tensor
    behind_starts: torch.Tensor | None


def prefill_splits(
    lens: torch.Tensor,
    starts: torch.Tensor | None,
    table: torch.Tensor | None,
    cu_q: torch.Tensor,
    splits: int,
    params: AttentionParameters,
    k: torch.Tensor,
) -> PrefillSplits:
    """Return the sequences of a prefill of two or more splits, in one launch."""
    batch = lens.shape[0]
    count = batch * splits

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=lens.device)

    rows, used_q, keys, first = empty(count + 1), empty(count), empty(count), empty(count + 1)
    behind = [empty(splits - 1, batch + extra) for extra in (1, 0, 0, 1)]
    blocks, in_split = lens, 1
    if table is not None:
        in_split = params.key_split // k.shape[1]
        blocks = empty(count, in_split)
    _prefill_splits_kernel[(count,)](
        lens,
        cu_q,
        lens if starts is None else starts,
        lens if table is None else table,
        rows,
        used_q,
        keys,
        first,
        blocks,
        *behind,
        0 if table is None else table.stride(0),
        0 if table is None else table.shape[1],
        batch,
        splits,
        SPLIT=params.key_split,
        IN_SPLIT=in_split,
        IN_BLOCK=triton.next_power_of_2(in_split),
        PAGED=table is not None,
        num_warps=_NUM_WARPS,
    )
    behind_rows, behind_used_q, behind_keys, behind_first = behind
    packed = table is None
    return PrefillSplits(
        rows, used_q, keys, first if packed else None, None if packed else blocks,
        behind_rows, behind_used_q, behind_keys, behind_first if packed else None,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride", "table_width", "batch", "splits"],
    do_not_specialize_on_alignment=["lens_ptr", "cu_q_ptr", "starts_ptr", "table_ptr"],
)
def _prefill_splits_kernel(
    lens_ptr,  # [B] int32
    cu_q_ptr,  # [B + 1] int32
    starts_ptr,  # [B + 1] int32 or unused
    table_ptr,  # [B, table_width] int32, row stride table_stride, or unused
    rows_ptr,  # [B * splits + 1] int32
    used_q_ptr,  # [B * splits] int32
    keys_ptr,  # [B * splits] int32
    first_ptr,  # [B * splits + 1] int32 or unused
    blocks_ptr,  # [B * splits, IN_SPLIT] int32 or unused
    behind_rows_ptr,  # [splits - 1, B + 1] int32
    behind_used_q_ptr,  # [splits - 1, B] int32
    behind_keys_ptr,  # [splits - 1, B] int32
    behind_first_ptr,  # [splits - 1, B + 1] int32 or unused
    table_stride,
    table_width,
    batch,
    splits,
    SPLIT: tl.constexpr,
    IN_SPLIT: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    PAGED: tl.constexpr,
):
    at = tl.program_id(0)
    request, split = at // splits, at % splits
    row = tl.load(cu_q_ptr + request)
    keys = tl.load(lens_ptr + request)
    # A padded request has queries and no keys; it takes part in no split.
    queries = tl.where(keys > 0, tl.load(cu_q_ptr + request + 1) - row, 0)
    position = keys - queries
    low = tl.minimum(tl.maximum(split * SPLIT - position, 0), queries)
    high = tl.minimum(tl.maximum((split + 1) * SPLIT - position, 0), queries)
    inside, behind = high - low, queries - high
    tl.store(rows_ptr + at, row + low)
    tl.store(used_q_ptr + at, inside)
    tl.store(keys_ptr + at, tl.where(inside > 0, position + high - split * SPLIT, 0))
    last = at == tl.num_programs(0) - 1
    if last:  # only the number of sequences is read off the last border
        tl.store(rows_ptr + at + 1, 0)
    key_row = 0
    if not PAGED:
        key_row = tl.load(starts_ptr + request) + split * SPLIT
        tl.store(first_ptr + at, key_row)
        if last:
            tl.store(first_ptr + at + 1, 0)
    if split < splits - 1:
        tl.store(behind_rows_ptr + split * (batch + 1) + request, row + high)
        tl.store(behind_used_q_ptr + split * batch + request, behind)
        tl.store(behind_keys_ptr + split * batch + request, tl.where(behind > 0, SPLIT, 0))
        if not PAGED:
            tl.store(behind_first_ptr + split * (batch + 1) + request, key_row)
        if request == batch - 1:
            tl.store(behind_rows_ptr + split * (batch + 1) + batch, 0)
            if not PAGED:
                tl.store(behind_first_ptr + split * (batch + 1) + batch, 0)
    if PAGED and inside > 0:
        page = tl.arange(0, IN_BLOCK)
        source = split * IN_SPLIT + page
        there = (page < IN_SPLIT) & (source < table_width)
        table_row = table_ptr + request.to(tl.int64) * table_stride
        block = tl.load(table_row + source, mask=there, other=0)
        tl.store(blocks_ptr + at.to(tl.int64) * IN_SPLIT + page, block, mask=page < IN_SPLIT)


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
        m = tl.full((BLOCK_H,), LOWEST, tl.float32)
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
