"""Around FlashAttention 3: which rows and keys each key split takes, as sequences of its calls.

All of it is computed on the device: nothing here reads a length on the host.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from consistent_kernels.attention.parameters import AttentionParameters

_NUM_WARPS = 4


@triton.jit
def _copy_pages(
    table_row,  # [table_width] int32, pages of a request
    blocks_row,  # [IN_SPLIT] int32, those of one split
    split,
    table_width,
    IN_SPLIT: tl.constexpr,
    IN_BLOCK: tl.constexpr,
):
    page = tl.arange(0, IN_BLOCK)
    source = split * IN_SPLIT + page
    there = (page < IN_SPLIT) & (source < table_width)
    block = tl.load(table_row + source, mask=there, other=0)
    tl.store(blocks_row + page, block, mask=page < IN_SPLIT)


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
            table_row = table_ptr + request.to(tl.int64) * table_stride
            blocks_row = blocks_ptr + at.to(tl.int64) * IN_SPLIT
            _copy_pages(table_row, blocks_row, split, table_width, IN_SPLIT, IN_BLOCK)


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
        table_row = table_ptr + request.to(tl.int64) * table_stride
        blocks_row = blocks_ptr + at.to(tl.int64) * IN_SPLIT
        _copy_pages(table_row, blocks_row, split, table_width, IN_SPLIT, IN_BLOCK)
