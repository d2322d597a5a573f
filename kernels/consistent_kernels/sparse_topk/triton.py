"""Sparse top-k in Triton: a tournament over groups of neighbouring scores, in one launch.

The k largest keys of a row lie in the k largest of its groups, where a group counts by its maximum
and, on a tie, by its place: an element of another group loses to k of those maxima. So a program
selects k groups, then k of their children, down to single scores. Every level holds at most WIDTH
keys in registers, whatever the values are: no histogram, no candidate list that could overflow.

Each of a row's programs first writes the group maxima of its CHUNKs; the last one to arrive (an
integer counter) runs the tournament. All arithmetic is on integers, so neither which program that
is nor any order of summation can move a bit. Places stay sorted throughout, so the result is
written in descending position without a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned_rows
from consistent_kernels.errors import invalid
from consistent_kernels.sparse_topk.spec import (
    CHUNK,
    KEYS_PER_WARP,
    MANY_ROWS,
    PROGRAMS,
    REGISTERS_FEW_ROWS,
    REGISTERS_MANY_ROWS,
    WIDTH,
)

# Below every key, NaN's included: a place outside the row's range.
ABSENT = tl.constexpr(-(1 << 31))
NAN_KEY = tl.constexpr(-(1 << 31) + 1)
ALIGN = tl.constexpr(16)
MIN_PARENTS = 512
"""Keeps a group within 16 scores, to which rows are aligned: wide loads stay inside a row."""

TICKET_PAD = 32
"""Counters of two rows share no 128-byte line."""


@triton.jit
def _ordered(bits):
    """Integers that compare as fp32 does; both zeros are 0 and every NaN is NAN_KEY."""
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(magnitude == 0, 0, key)
    return tl.where(magnitude > 0x7F800000, NAN_KEY, key)


@triton.jit
def _groups(size, ARITY: tl.constexpr):
    """Room for the maxima of `size` elements in groups of ARITY, in whole 64-byte lines."""
    return ((size + ARITY - 1) // ARITY + ALIGN - 1) // ALIGN * ALIGN


@triton.jit
def _maxima(keys, GROUPS: tl.constexpr, ARITY: tl.constexpr):
    return tl.max(tl.reshape(keys, (GROUPS, ARITY)), axis=1)


@triton.jit
def _chunk_keys(row_ptr, piece, first, stop, CHUNK: tl.constexpr):
    """Keys of the piece-th CHUNK of a row; ABSENT outside [first, stop)."""
    places = piece * CHUNK + tl.arange(0, CHUNK)
    if (piece * CHUNK >= first) & ((piece + 1) * CHUNK <= stop):
        # Without a mask the loads are 16 bytes wide.
        keys = _ordered(tl.load(row_ptr + places))
    else:
        inside = (places >= first) & (places < stop)
        keys = tl.where(inside, _ordered(tl.load(row_ptr + places, mask=inside, other=0)), ABSENT)
    return keys


@triton.jit
def _probes(distance, count_low, count_high, k):
    """Two offsets in [1, distance - 1] at which to count next: only speed depends on them.

    An eighth below and above the place of the k-th key if keys were spread evenly, but not in the
    outer quarters, so that a step removes a quarter at least.
    """
    share = (count_low - k).to(tl.float32) / (count_low - count_high).to(tl.float32)
    guess = (share * distance.to(tl.float32)).to(tl.uint32)
    quarter = distance >> 2
    guess = tl.minimum(tl.maximum(guess, quarter), distance - quarter)
    margin = tl.maximum(distance >> 3, 1)
    lower = tl.minimum(tl.maximum(guess - tl.minimum(margin, guess), 1), distance - 1)
    upper = tl.minimum(tl.maximum(guess + margin, lower), distance - 1)
    return lower.to(tl.int32, bitcast=True), upper.to(tl.int32, bitcast=True)


@triton.jit
def _threshold(keys, k, low, high):
    """Find (low, high, count(keys >= low)) that separate the k largest keys.

    Invariant: count(keys >= low) >= k > count(keys >= high). Ends when low and high are neighbours
    or exactly k keys reach low. Two probes a step share one packed count.
    """
    count_low = tl.sum((keys >= low).to(tl.int32), axis=0)
    count_high = tl.full((), 0, tl.int32)
    while (count_low != k) & (high != low + 1):
        # The distance may exceed int32; as an unsigned number it does not.
        distance = (high - low).to(tl.uint32, bitcast=True)
        below, above = _probes(distance, count_low, count_high, k)
        lower = low + below
        upper = low + above
        packed = tl.sum((keys >= lower).to(tl.int32) + ((keys >= upper).to(tl.int32) << 16), axis=0)
        count_lower = packed & 0xFFFF
        count_upper = packed >> 16
        if count_upper >= k:
            low = upper
            count_low = count_upper
        elif count_lower >= k:
            low = lower
            count_low = count_lower
            high = upper
            count_high = count_upper
        else:
            high = lower
            count_high = count_lower
    return low, high, count_low


@triton.jit
def _select(keys, k, low, high):
    """Return (chosen, slot, low): the k largest keys, and their ranks by ascending place."""
    low, high, count_low = _threshold(keys, k, low, high)
    above = keys >= high
    level = (keys >= low) & (keys < high)
    ranks = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), axis=0)
    # Of equal keys the last ones are taken.
    passed = count_low - k
    level_rank = ranks >> 16
    chosen = above | (level & (level_rank > passed))
    slot = (ranks & 0xFFFF) + tl.maximum(level_rank - passed, 0) - 1
    return chosen, slot, low


@triton.jit(
    do_not_specialize=["columns"], do_not_specialize_on_alignment=["starts_ptr", "ends_ptr"]
)
def _sparse_topk_kernel(
    bits_ptr,  # [R, N] fp32 as int32, row stride stride; rows aligned to 16 bytes
    starts_ptr,  # [R]
    ends_ptr,  # [R]
    out_ptr,  # [R, K] int32
    maxima_ptr,  # [R, MAXIMA] int32: group maxima, level 1 first
    nodes_ptr,  # [R, PARENTS] int32
    tickets_ptr,  # [R, TICKET_PAD] int32, zero before and after every launch
    stride,
    columns,
    maxima_stride,
    K: tl.constexpr,
    PARENTS: tl.constexpr,  # power of two >= K
    ARITY: tl.constexpr,  # WIDTH / PARENTS
    LEVELS: tl.constexpr,  # most levels that `columns` needs
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    TICKET_PAD: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    start = tl.maximum(tl.load(starts_ptr + row).to(tl.int32), 0)
    end = tl.minimum(tl.load(ends_ptr + row).to(tl.int32), columns)
    length = end - start
    if length <= K:
        if part == 0:
            slots = tl.arange(0, PARENTS)
            whole = tl.where(slots < length, length - 1 - slots, -1)
            tl.store(out_ptr + row * K + slots, whole, mask=slots < K)
    else:
        # Groups are cut at aligned columns; which group an element is in moves no result.
        origin = start // ALIGN * ALIGN
        first = start - origin
        stop = end - origin
        row_ptr = bits_ptr + row * stride + origin
        levels = 0
        parts = 1
        if LEVELS > 0:
            reach = WIDTH
            for _ in tl.static_range(LEVELS):
                levels += (stop > reach).to(tl.int32)
                reach *= ARITY
            pieces = (stop + CHUNK - 1) // CHUNK
            parts = tl.where(levels > 0, tl.minimum(tl.num_programs(0), pieces), 1)
        if part < parts:
            last = parts == 1
            level_base = maxima_ptr + row * maxima_stride
            if LEVELS > 0:  # noqa: SIM102 (the compiler knows LEVELS, not levels)
                if levels > 0:
                    for piece in range(part, pieces, parts):
                        keys = _chunk_keys(row_ptr, piece, first, stop, CHUNK)
                        size = _groups(columns, ARITY)
                        store_ptr = level_base
                        for level in tl.static_range(LEVELS):
                            keys = _maxima(keys, CHUNK // ARITY ** (level + 1), ARITY)
                            groups = tl.arange(0, CHUNK // ARITY ** (level + 1))
                            groups += piece * (CHUNK // ARITY ** (level + 1))
                            tl.store(store_ptr + groups, keys, mask=groups < size)
                            store_ptr += size
                            size = _groups(size, ARITY)
                    # All stores of this program before its ticket; all tickets before the reads.
                    tl.debug_barrier()
                    ticket = tl.atomic_add(
                        tickets_ptr + row * TICKET_PAD, 1, sem="acq_rel", scope="gpu"
                    )
                    last = ticket == parts - 1
            if last:
                if LEVELS > 0:
                    tl.store(tickets_ptr + row * TICKET_PAD, 0)
                slots = tl.arange(0, PARENTS)
                parent = slots
                child = tl.arange(0, ARITY)[None, :]
                low = tl.full((), ABSENT, tl.int32)
                high = tl.full((), 0x7F800001, tl.int32)
                depth = levels
                while depth >= 0:
                    # [PARENTS, ARITY]: brothers are neighbours in memory, one wide load.
                    place = parent[:, None] * ARITY + child
                    if depth == 0:
                        known = (parent >= 0) & (parent * ARITY < stop)
                        bits = tl.load(row_ptr + place, mask=known[:, None], other=0)
                        inside = known[:, None] & (place >= first) & (place < stop)
                        keys = tl.where(inside, _ordered(bits), ABSENT)
                    else:
                        size = _groups(columns, ARITY)
                        group = ARITY
                        offset = 0
                        for _below in range(1, depth):
                            offset += size
                            size = _groups(size, ARITY)
                            group *= ARITY
                        limit = (stop + group - 1) // group
                        known = (parent >= 0) & (parent * ARITY < limit)
                        keys = tl.load(
                            level_base + offset + place, mask=known[:, None], other=ABSENT
                        )
                        keys = tl.where(place < limit, keys, ABSENT)
                    keys = tl.reshape(keys, (WIDTH,))
                    place = tl.reshape(place, (WIDTH,))
                    if depth == levels:
                        high = tl.max(keys, axis=0) + 1
                    chosen, slot, low = _select(keys, K, low, high)
                    if depth == 0:
                        tl.store(out_ptr + row * K + (K - 1 - slot), place - first, mask=chosen)
                    else:
                        tl.store(nodes_ptr + row * PARENTS + slot, place, mask=chosen)
                        tl.debug_barrier()
                        parent = tl.load(
                            nodes_ptr + row * PARENTS + slots, mask=slots < K, other=-1
                        )
                    depth -= 1


def _shape(columns: int, k: int) -> tuple[int, int, int, int]:
    """Return (width, parents, arity, levels) for rows of `columns` scores."""
    parents = max(MIN_PARENTS, triton.next_power_of_2(k))
    width = WIDTH if columns > WIDTH // 2 else WIDTH // 2
    arity = width // parents
    levels, reach = 0, width
    while reach < columns:
        levels, reach = levels + 1, reach * arity
    return width, parents, arity, levels


def _maxima_size(columns: int, arity: int, levels: int) -> int:
    total = 0
    for _ in range(levels):
        # `_groups` on the host.
        columns = triton.cdiv(triton.cdiv(columns, arity), ALIGN.value) * ALIGN.value
        total += columns
    return total


def sparse_topk_fwd(
    scores: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    tickets: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the kernel.

    Args:
        scores: [R, N] fp32; starts, ends: [R] int32 or int64.
        tickets: zeros [>= R, TICKET_PAD] int32, zero again afterwards; None makes them here.

    Returns:
        [R, k] int32.

    Raises:
        InvalidInputError: tickets of another width: the kernel would write behind them.
    """
    if tickets is not None and (tickets.shape[1] != TICKET_PAD or not tickets.is_contiguous()):
        expected = f"contiguous, {TICKET_PAD} columns wide"
        given = f"{tuple(tickets.shape)} of strides {tickets.stride()}"
        raise invalid("sparse_topk", "tickets", expected, given, "Use sparse_topk_tickets")
    rows, columns = scores.shape
    out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    scores = aligned_rows(scores)
    width, parents, arity, levels = _shape(columns, k)
    maxima_size = _maxima_size(columns, arity, levels)
    maxima, nodes = out, out
    if levels:
        maxima = torch.empty((rows, maxima_size), dtype=torch.int32, device=scores.device)
        nodes = torch.empty((rows, parents), dtype=torch.int32, device=scores.device)
        if tickets is None:
            tickets = torch.zeros((rows, TICKET_PAD), dtype=torch.int32, device=scores.device)
    # How many programs share a row follows the batch; on integers that moves no bit.
    parts, registers = 1, None
    if levels:
        few = rows <= MANY_ROWS
        parts = min(triton.cdiv(columns, CHUNK), PROGRAMS // rows) if few else 1
        registers = REGISTERS_FEW_ROWS if few else REGISTERS_MANY_ROWS
    _sparse_topk_kernel[(parts, rows)](
        scores.view(torch.int32),
        starts.contiguous(),
        ends.contiguous(),
        out,
        maxima,
        nodes,
        tickets if levels else out,
        scores.stride(0),
        columns,
        maxima_size,
        K=k,
        PARENTS=parents,
        ARITY=arity,
        LEVELS=levels,
        WIDTH=width,
        CHUNK=CHUNK,
        TICKET_PAD=TICKET_PAD,
        num_warps=width // KEYS_PER_WARP,
        maxnreg=registers,
    )
    return out
