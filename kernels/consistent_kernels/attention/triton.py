"""Attention in Triton: one binary for prefill, chunks and decode, for packed and paged keys.

A program holds BLOCK_ROWS rows: the heads of a group at SLOTS positions, tiles beginning at
multiples of SLOTS. It walks one key split in ascending tiles of 64. Where a tile of queries has
more than one split, partial results go through memory and `_attention_merge_kernel` adds them in
ascending order; how many splits are in flight moves no bit.

Reductions over keys use `tl.max` and `tl.sum`: every phase runs the same binary, so their order is
one order. Packed keys are pages without end: page b begins at row cu_seqlens_k[b].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.attention.parameters import AttentionParameters
from consistent_kernels.attention.spec import (
    BLOCK_ROWS,
    KEY_TILE,
    NUM_STAGES,
    NUM_WARPS,
    query_slots,
)
from consistent_kernels.errors import UnsupportedError, invalid

LOWEST = tl.constexpr(-3.4028234663852886e38)
NO_WINDOW = 1 << 30
ENDLESS_PAGE = 1 << 30
WORKSPACE_BYTES = 256 << 20
"""Bounds the partial results in flight; more splits than fit run one launch after the other."""


@triton.jit
def _find_sequence(target, cu_q_ptr, num_seqs, SLOTS: tl.constexpr, PER_SEQ: tl.constexpr):
    """Return the last b in [0, num_seqs] with cu_q[b] // SLOTS + PER_SEQ * b <= target."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_q_ptr + middle) // SLOTS + PER_SEQ * middle <= target:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _sequence(b, cu_q_ptr, lens_ptr, num_seqs, num_tokens):
    """Return (first row, position of the first row, end position, whether it has keys).

    Sequence num_seqs is the padding behind the last one. Rows without keys count from position 0.
    """
    row = tl.load(cu_q_ptr + b)
    is_request = b < num_seqs
    end_row = tl.load(cu_q_ptr + b + 1, mask=is_request, other=num_tokens)
    keys = tl.load(lens_ptr + b, mask=is_request, other=0)
    has_keys = keys > 0
    start = tl.where(has_keys, tl.maximum(keys - (end_row - row), 0), 0)
    return row, start, tl.where(has_keys, keys, end_row - row), has_keys


@triton.jit
def _key_tiles(first, has_keys, window, KEY_TILE: tl.constexpr):
    """Return the [begin, end) key tiles that the query tile at position `first` walks."""
    begin = tl.maximum(first - window + 1, 0) // KEY_TILE
    end = first // KEY_TILE + 1
    return tl.where(has_keys, begin, 0), tl.where(has_keys, end, 0)


@triton.jit
def _tile_rows(
    keys, readable, table_row_ptr, page_size, page_stride, row_stride, head_offset
):  # [KEY_TILE] element offsets
    page = tl.load(table_row_ptr + keys // page_size, mask=readable, other=0).to(tl.int64)
    offset = page * page_stride + (keys % page_size).to(tl.int64) * row_stride + head_offset
    return tl.multiple_of(offset, 8)


@triton.jit(
    do_not_specialize=[
        "window",
        "num_seqs",
        "num_tokens",
        "first_split",
        "q_stride",
        "table_stride",
        "page_size",
        "k_page_stride",
        "k_row_stride",
        "v_page_stride",
        "v_row_stride",
        "scale",
    ],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "cu_q_ptr"],
)
def _attention_fwd_kernel(
    q_ptr,  # [T, Hq, D], token stride q_stride
    k_ptr,  # pages of rows of [Hk, D]
    v_ptr,  # the same
    out_ptr,  # [T, Hq, D] contiguous
    lse_ptr,  # [T, Hq] fp32
    part_acc_ptr,  # [splits in flight, T, Hq, D] fp32
    part_m_ptr,  # [splits in flight, T, Hq] fp32
    part_l_ptr,  # [splits in flight, T, Hq] fp32
    table_ptr,  # [B, table_stride] int32
    lens_ptr,  # [B] int32
    cu_q_ptr,  # [B + 1] int32
    scale,
    window,
    num_seqs,
    num_tokens,
    first_split,
    q_stride,
    table_stride,
    page_size,
    k_page_stride,
    k_row_stride,
    v_page_stride,
    v_row_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
):
    pid = tl.program_id(0)
    kv_head = tl.program_id(1)
    b = _find_sequence(pid, cu_q_ptr, num_seqs, SLOTS, 2)
    row, start, end, has_keys = _sequence(b, cu_q_ptr, lens_ptr, num_seqs, num_tokens)
    local = pid - (row // SLOTS + 2 * b)
    first = (start // SLOTS + local) * SLOTS
    begin_tile, end_tile = _key_tiles(first, has_keys, window, KEY_TILE)
    first_of_row = begin_tile // SPLIT_TILES
    last_of_row = tl.maximum(end_tile - 1, 0) // SPLIT_TILES
    split = first_split + tl.program_id(2)
    if (start < end) & (first < end) & (split >= first_of_row) & (split <= last_of_row):
        index = tl.arange(0, BLOCK_ROWS)
        position = first + index // GROUP
        valid = (position >= start) & (position < end) & (index < SLOTS * GROUP)
        token = (row + position - start).to(tl.int64)
        head = kv_head * GROUP + index % GROUP
        columns = tl.arange(0, BLOCK_D)
        mask = valid[:, None] & (columns < HEAD_DIM)[None, :]
        q_rows = tl.multiple_of(token * q_stride + head * HEAD_DIM, 8)
        q = tl.load(q_ptr + q_rows[:, None] + columns[None, :], mask=mask, other=0.0)

        # Keys outside [key_begin, key_end) are seen by no valid row and are never read.
        key_begin = tl.maximum(tl.maximum(first, start) - window + 1, 0)
        key_end = tl.minimum(first + SLOTS, end)
        table_row_ptr = table_ptr + b.to(tl.int64) * table_stride
        head_offset = kv_head * HEAD_DIM
        m = tl.full((BLOCK_ROWS,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        acc = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
        tile_begin = tl.maximum(begin_tile, split * SPLIT_TILES)
        tile_end = tl.minimum(end_tile, (split + 1) * SPLIT_TILES)
        for tile in range(tile_begin, tile_end):
            keys = tile * KEY_TILE + tl.arange(0, KEY_TILE)
            readable = (keys >= key_begin) & (keys < key_end)
            kv_mask = readable[:, None] & (columns < HEAD_DIM)[None, :]
            k_rows = _tile_rows(
                keys, readable, table_row_ptr, page_size, k_page_stride, k_row_stride, head_offset
            )
            k = tl.load(k_ptr + k_rows[:, None] + columns[None, :], mask=kv_mask, other=0.0)
            scores = tl.dot(q, k.T) * scale
            hidden = (keys[None, :] > position[:, None]) | (
                keys[None, :] <= position[:, None] - window
            )
            scores = tl.where(hidden, float("-inf"), scores)
            m_new = tl.maximum(m, tl.max(scores, 1))
            p = tl.exp(scores - m_new[:, None])
            rescale = tl.exp(m - m_new)
            total = total * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            v_rows = _tile_rows(
                keys, readable, table_row_ptr, page_size, v_page_stride, v_row_stride, head_offset
            )
            v = tl.load(v_ptr + v_rows[:, None] + columns[None, :], mask=kv_mask, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc)
            m = m_new

        if first_of_row == last_of_row:
            has_any = total > 0
            safe = tl.where(has_any, total, 1.0)
            # + 0.0: the sign of an exact zero would follow keys that the row does not see.
            out = tl.div_rn(acc, tl.broadcast_to(safe[:, None], (BLOCK_ROWS, BLOCK_D))) + 0.0
            out_rows = token * (HEADS * HEAD_DIM) + head * HEAD_DIM
            tl.store(
                out_ptr + out_rows[:, None] + columns[None, :],
                out.to(out_ptr.dtype.element_ty),
                mask=mask,
            )
            lse = tl.where(has_any, m + tl.log(safe), float("-inf"))
            tl.store(lse_ptr + token * HEADS + head, lse, mask=valid)
        else:
            part = (tl.program_id(2).to(tl.int64) * num_tokens + token) * HEADS + head
            tl.store(part_acc_ptr + part[:, None] * HEAD_DIM + columns[None, :], acc, mask=mask)
            tl.store(part_m_ptr + part, m, mask=valid)
            tl.store(part_l_ptr + part, total, mask=valid)


@triton.jit(
    do_not_specialize=["window", "num_seqs", "num_tokens", "first_split", "splits_in_flight"],
    do_not_specialize_on_alignment=["lens_ptr", "cu_q_ptr"],
)
def _attention_merge_kernel(
    out_ptr,  # [T, Hq, D] contiguous
    lse_ptr,  # [T, Hq] fp32
    part_acc_ptr,  # [splits in flight, T, Hq, D] fp32
    part_m_ptr,  # [splits in flight, T, Hq] fp32
    part_l_ptr,  # [splits in flight, T, Hq] fp32
    carry_acc_ptr,  # [T, Hq, D] fp32: splits of earlier launches, merged
    carry_m_ptr,  # [T, Hq] fp32
    carry_l_ptr,  # [T, Hq] fp32
    lens_ptr,  # [B] int32
    cu_q_ptr,  # [B + 1] int32
    window,
    num_seqs,
    num_tokens,
    first_split,
    splits_in_flight,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLOTS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
):
    token = tl.program_id(0)
    b = _find_sequence(token, cu_q_ptr, num_seqs, 1, 0)
    row, start, _, has_keys = _sequence(b, cu_q_ptr, lens_ptr, num_seqs, num_tokens)
    first = (start + token - row) // SLOTS * SLOTS
    begin_tile, end_tile = _key_tiles(first, has_keys, window, KEY_TILE)
    first_of_row = begin_tile // SPLIT_TILES
    last_of_row = tl.maximum(end_tile - 1, 0) // SPLIT_TILES
    end_split = first_split + splits_in_flight
    touches = (first_of_row < end_split) & (last_of_row >= first_split)
    if (first_of_row != last_of_row) & touches:
        columns = tl.arange(0, BLOCK_D)
        inside = columns < HEAD_DIM
        at = token.to(tl.int64) * HEADS + tl.program_id(1)
        # A maximum of LOWEST, a sum of 0 and an output of 0 stand for "nothing yet": the first
        # split is merged into them with factors 0 and 1, which change no bit of it.
        is_resumed = first_of_row < first_split
        m = tl.load(carry_m_ptr + at, mask=is_resumed, other=LOWEST)
        total = tl.load(carry_l_ptr + at, mask=is_resumed, other=0.0)
        acc = tl.load(carry_acc_ptr + at * HEAD_DIM + columns, mask=inside & is_resumed, other=0.0)
        low = tl.maximum(first_of_row, first_split)
        high = tl.minimum(last_of_row + 1, end_split)
        for split in range(low, high):
            part = (split - first_split).to(tl.int64) * num_tokens * HEADS + at
            part_m = tl.load(part_m_ptr + part)
            part_acc = tl.load(part_acc_ptr + part * HEAD_DIM + columns, mask=inside, other=0.0)
            m_new = tl.maximum(m, part_m)
            ours, theirs = tl.exp(m - m_new), tl.exp(part_m - m_new)
            total = total * ours + tl.load(part_l_ptr + part) * theirs
            acc = acc * ours + part_acc * theirs
            m = m_new
        if last_of_row < end_split:
            out = tl.div_rn(acc, tl.zeros((BLOCK_D,), tl.float32) + total) + 0.0
            tl.store(
                out_ptr + at * HEAD_DIM + columns, out.to(out_ptr.dtype.element_ty), mask=inside
            )
            tl.store(lse_ptr + at, m + tl.log(total))
        else:
            tl.store(carry_acc_ptr + at * HEAD_DIM + columns, acc, mask=inside)
            tl.store(carry_m_ptr + at, m)
            tl.store(carry_l_ptr + at, total)


# A copy has the same bits in every form, so this kernel may specialize.
@triton.jit
def _write_kv_kernel(
    k_ptr,  # [T, Hk * D], row stride k_stride
    v_ptr,  # [T, Hk * D], row stride v_stride
    k_cache_ptr,  # pages of rows of Hk * D
    v_cache_ptr,  # the same
    slot_ptr,  # [T] int64
    k_stride,
    v_stride,
    page_size,
    k_page_stride,
    v_page_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        columns = tl.arange(0, BLOCK)
        inside = columns < WIDTH
        row = slot % page_size * WIDTH + columns
        page = slot // page_size
        k = tl.load(k_ptr + token * k_stride + columns, mask=inside)
        v = tl.load(v_ptr + token * v_stride + columns, mask=inside)
        tl.store(k_cache_ptr + page * k_page_stride + row, k, mask=inside)
        tl.store(v_cache_ptr + page * v_page_stride + row, v, mask=inside)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x [n, heads, D] with packed heads, 16-byte aligned: one specialization, one binary."""
    width = x.shape[2]
    if x.stride()[1:] == (width, 1) and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _constants(params: AttentionParameters) -> dict[str, int]:
    return {
        "HEADS": params.num_heads,
        "HEAD_DIM": params.head_dim,
        "BLOCK_D": triton.next_power_of_2(params.head_dim),
        "SLOTS": query_slots(params.group, BLOCK_ROWS),
        "KEY_TILE": KEY_TILE,
        "SPLIT_TILES": params.key_split // KEY_TILE,
    }


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    cu_q: torch.Tensor,
    pages: tuple[int, int, int, int, int],
    params: AttentionParameters,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward, and the merge where a sequence may have more than one split.

    Args:
        table: [B, n] int32; pages: its row stride is table.stride(0), then
            (page size, key page stride, key row stride, value page stride, value row stride).
    """
    if params.group > BLOCK_ROWS:
        raise UnsupportedError(
            "attention", f"{params.group} heads a group", [f"at most {BLOCK_ROWS}"]
        )
    tokens, heads, width = q.shape
    out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    constants = _constants(params)
    window = NO_WINDOW if params.sliding_window is None else params.sliding_window
    num_seqs = lens.shape[0]
    splits = max(1, triton.cdiv(max_seq_len, params.key_split))
    split_bytes = tokens * heads * (width + 2) * 4
    flight = min(splits, max(1, WORKSPACE_BYTES // split_bytes))
    parts = _workspace(flight, q) if splits > 1 else (lse, lse, lse)
    carry = _workspace(1, q) if splits > flight else parts
    tiles = tokens // constants["SLOTS"] + 2 * num_seqs + 2
    for first in range(0, splits, flight):
        _attention_fwd_kernel[(tiles, params.num_kv_heads, flight)](
            q, k, v, out, lse, *parts, table, lens, cu_q,
            params.scale, window, num_seqs, tokens, first, q.stride(0), table.stride(0), *pages,
            GROUP=params.group, BLOCK_ROWS=BLOCK_ROWS, **constants,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip
        if splits > 1:
            _attention_merge_kernel[(tokens, heads)](
                out, lse, *parts, *carry, lens, cu_q, window, num_seqs, tokens, first, flight,
                **constants, num_warps=NUM_WARPS,
            )  # fmt: skip
    return out, lse


def _workspace(splits: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, heads, width = q.shape
    acc = torch.empty((splits, tokens, heads, width), dtype=torch.float32, device=q.device)
    m = torch.empty((splits, tokens, heads), dtype=torch.float32, device=q.device)
    return acc, m, torch.empty_like(m)


def attention_varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    params: AttentionParameters,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch over packed keys; shapes as in `api.attention_varlen`.

    Args:
        max_seq_len: an upper bound of the keys of a sequence.
    """
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    cu_k = cu_seqlens_k.to(torch.int32)
    pages = (ENDLESS_PAGE, k.stride(0), k.stride(0), v.stride(0), v.stride(0))
    lens = cu_k[1:] - cu_k[:-1]
    table = cu_k[:-1].unsqueeze(1)
    return _launch(q, k, v, table, lens, cu_seqlens_q.to(torch.int32), pages, params, max_seq_len)


def attention_paged_fwd(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    params: AttentionParameters,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch over pages; shapes as in `api.attention_paged`."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.data_ptr() % 16 or cache.stride(0) % 8:
            raise invalid("attention_paged", name, "aligned to 16 bytes", cache.data_ptr() % 16)
    table = block_table.to(torch.int32)
    pages = (k_cache.shape[1], *k_cache.stride()[:2], *v_cache.stride()[:2])
    return _launch(
        _aligned(q), k_cache, v_cache, table, seq_lens.to(torch.int32),
        cu_seqlens_q.to(torch.int32), pages, params, max_seq_len,
    )  # fmt: skip


def write_kv_fwd(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Launch the copy; shapes as in `api.write_kv`."""
    k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k, v))
    width = k.shape[1] * k.shape[2]
    if k.shape[0]:
        slots = slot_mapping if slot_mapping.dtype == torch.int64 else slot_mapping.long()
        _write_kv_kernel[(k.shape[0],)](
            k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0),
            k_cache.shape[1], k_cache.stride(0), v_cache.stride(0),
            WIDTH=width, BLOCK=1 << (width - 1).bit_length(), num_warps=4,
        )  # fmt: skip
