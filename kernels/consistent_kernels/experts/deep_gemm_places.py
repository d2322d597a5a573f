"""Where the rows of each expert stand, aligned as DeepGEMM's grouped GEMMs want: integers only."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

PLACE_ALIGNMENT = 128
"""Experts start at multiples of this many places: a tile of DeepGEMM holds one expert only."""

PLACE_STEPS = (512, 2048)
"""Contiguous places are rounded up to a multiple of the first, from the second on to one of the
second: DeepGEMM's kernel follows their number, and every number compiled in the middle of a run
costs seconds."""

NO_PLACE_LEFT = -2
"""What a row gets whose expert has no place left; its result is NaN, so that it shows."""

_SORT_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["rows", "places", "capacity"])
def _expert_places_kernel(
    ids_ptr,  # [rows] int32
    place_ptr,  # [rows], -1 where a row goes nowhere, OVERFLOW where its expert has no place left
    expert_ptr,  # [places] expert of each place, -1 where none is needed; unused where PACKED
    count_ptr,  # [E]; the place behind each expert's last row where PACKED
    rows,
    places,
    capacity,
    E: tl.constexpr,
    BINS: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    OVERFLOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program an expert. It counts the rows of lower experts itself, so none waits for another.
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, rows, BLOCK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < rows, other=-1)
        counts += tl.histogram(tl.where((ids >= 0) & (ids < E), ids, E), BINS)
    own = tl.sum(tl.where(bins == expert, counts, 0), 0)
    aligned = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    if MASKED:
        # More rows than a place was made for would overwrite the next expert's.
        own = tl.minimum(own, capacity)
        first = expert * capacity
        end = first + capacity
    else:
        first = tl.sum(tl.where(bins < expert, aligned, 0), 0)
        end = first + (own + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    tl.store(count_ptr + expert, first + own if PACKED else own)
    written = 0
    for start in range(0, rows, BLOCK):
        index = start + lane
        ids = tl.load(ids_ptr + index, mask=index < rows, other=-1)
        mine = (ids == expert).to(tl.int32)
        rank = written + tl.cumsum(mine, 0) - 1
        place = tl.where(rank < own, first + rank, OVERFLOW)
        nowhere = (ids < 0) | (ids >= E)
        wanted = (mine > 0) | (nowhere & (expert == 0))
        tl.store(place_ptr + index, tl.where(mine > 0, place, -1), mask=wanted & (index < rows))
        written += tl.sum(mine, 0)
    if not PACKED:
        for start in range(first, end, BLOCK):
            place = start + lane
            # An aligned block of places belongs to one expert, the places behind its rows included.
            used = place < first + (own if MASKED else end - first)
            tl.store(expert_ptr + place, tl.where(used, expert, -1), mask=place < end)
        if (expert == E - 1) & (end < places):
            for start in range(end, places, BLOCK):
                tl.store(expert_ptr + start + lane, -1, mask=start + lane < places)


@dataclasses.dataclass(frozen=True)
class Places:
    """Places of rows, on the device.

    Attributes:
        place: [rows] int32, -1 where a row goes nowhere, NO_PLACE_LEFT where a token names an
            expert twice and the masked layout has no place for it.
        expert: [places] int32, -1 where no result is needed.
        count: [E] int32, rows of each expert.
        capacity: places of each expert in the masked layout, else None.
    """

    place: torch.Tensor
    expert: torch.Tensor
    count: torch.Tensor
    capacity: int | None

    @property
    def size(self) -> int:
        """How many places there are."""
        return self.expert.numel()


@dataclasses.dataclass(frozen=True)
class PackedPlaces:
    """Places of rows whose experts stand close together, on the device.

    Attributes:
        place: [rows] int32, -1 where a row goes nowhere.
        end: [E] int32, the place behind each expert's last row; the next one begins at the next
            multiple of `alignment`.
        size: how many places there are.
        alignment: of an expert's first place.
    """

    place: torch.Tensor
    end: torch.Tensor
    size: int
    alignment: int


AnyPlaces = Places | PackedPlaces


def capacity_of(tokens: int) -> int:
    """Return the places of one expert in the masked layout, enough for distinct ids."""
    return triton.cdiv(tokens, PLACE_ALIGNMENT) * PLACE_ALIGNMENT


def contiguous_places(rows: int, num_experts: int) -> int:
    """Return how many places `rows` rows need, however they fall among the experts."""
    # n experts with rows need at most (rows - n) / 128 blocks besides the n they begin.
    filled = min(rows, num_experts)
    places = ((rows - filled) // PLACE_ALIGNMENT + filled) * PLACE_ALIGNMENT
    step = PLACE_STEPS[places > PLACE_STEPS[1]]
    return triton.cdiv(places, step) * step


def empty_places(ids: torch.Tensor, num_experts: int, *, masked: bool) -> Places:
    """Return uninitialized places for `ids` [T, K]; arguments as in `expert_places`."""
    capacity = capacity_of(ids.shape[0]) if masked else None
    if capacity is not None:
        places = num_experts * capacity
    else:
        places = contiguous_places(ids.numel(), num_experts)
    place, expert, count = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (ids.numel(), places, num_experts)
    )
    return Places(place, expert, count, capacity)


def expert_places(ids: torch.Tensor, num_experts: int, *, masked: bool) -> Places:
    """Place the (token, slot) rows of `ids` by expert, without waiting for the device.

    Args:
        ids: [T, K] int32 contiguous; others than 0 to num_experts - 1 have no place.
        num_experts: E.
        masked: [E, capacity] places, a capacity of T rounded up (ids of a token are distinct);
            else one expert after the other, each from a multiple of 128, their number rounded up.
    """
    places = empty_places(ids, num_experts, masked=masked)
    _expert_places_kernel[(num_experts,)](
        ids,
        places.place,
        places.expert,
        places.count,
        ids.numel(),
        places.expert.numel(),
        places.capacity or 0,
        E=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        MASKED=masked,
        PACKED=False,
        ALIGNMENT=PLACE_ALIGNMENT,
        OVERFLOW=NO_PLACE_LEFT,
        BLOCK=_SORT_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return places


def place_packed(ids: torch.Tensor, places: PackedPlaces) -> None:
    """Fill `place` and `end` of packed places, without waiting for the device.

    Args:
        ids: as in `expert_places`.
    """
    num_experts = places.end.numel()
    _expert_places_kernel[(num_experts,)](
        ids,
        places.place,
        places.place,
        places.end,
        ids.numel(),
        places.size,
        0,
        E=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        MASKED=False,
        PACKED=True,
        ALIGNMENT=places.alignment,
        OVERFLOW=NO_PLACE_LEFT,
        BLOCK=_SORT_BLOCK,
        num_warps=_NUM_WARPS,
    )
