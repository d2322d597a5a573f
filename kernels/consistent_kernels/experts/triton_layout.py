"""Where the rows of each expert stand, and which expert a GEMM tile works for: integers only."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from consistent_kernels.experts.spec import SORT_BLOCKS


@triton.jit(do_not_specialize=["rows", "capacity", "max_tiles"])
def _expert_layout_kernel(
    ids_ptr,  # [rows] int32
    order_ptr,  # [rows], or [E * capacity] when MASKED: the flat row at each place
    tile_expert_ptr,  # [max_tiles], -1 where no tile is needed
    tile_start_ptr,  # [max_tiles], first place of the tile
    tile_end_ptr,  # [max_tiles], end of its expert's places
    rows,
    capacity,
    max_tiles,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program an expert. It counts the rows of lower experts itself, so none waits for another.
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    below = 0
    own = 0
    for start in range(0, rows, BLOCK):
        index = start + lane
        ids = tl.load(ids_ptr + index, mask=index < rows, other=-1)
        below += tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32), 0)
        own += tl.sum((ids == expert).to(tl.int32), 0)
    if MASKED:
        first_place = expert * capacity
        # More rows than a place was made for would overwrite the next expert's.
        own = tl.minimum(own, capacity)
        first_tile = expert * ((capacity + BLOCK_M - 1) // BLOCK_M)
        next_tile = first_tile + (capacity + BLOCK_M - 1) // BLOCK_M
    else:
        first_place = below
        # Expert e needs at most this many tiles before the next one's first: no program has to
        # know how many tiles the lower experts really use.
        first_tile = below // BLOCK_M + expert
        next_tile = (below + own) // BLOCK_M + expert + 1
        if expert == tl.num_programs(0) - 1:
            next_tile = max_tiles
    written = 0
    for start in range(0, rows, BLOCK):
        index = start + lane
        ids = tl.load(ids_ptr + index, mask=index < rows, other=-1)
        mine = (ids == expert).to(tl.int32)
        rank = written + tl.cumsum(mine, 0) - 1
        tl.store(order_ptr + first_place + rank, index, mask=(mine > 0) & (rank < own))
        written += tl.sum(mine, 0)
    for start in range(first_tile, next_tile, BLOCK):
        tile = start + lane
        place = (tile - first_tile) * BLOCK_M
        inside = tile < next_tile
        used = place < own
        tl.store(tile_expert_ptr + tile, tl.where(used, expert, -1), mask=inside)
        tl.store(tile_start_ptr + tile, first_place + place, mask=inside)
        tl.store(tile_end_ptr + tile, first_place + own, mask=inside)


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """Places of rows and tiles of experts, on the device.

    Attributes:
        order: [places] int32, the flat (token, slot) row at each place; unused places undefined.
        tile_expert, tile_start, tile_end: [tiles] int32.
        places: rows of a buffer in this layout.
    """

    order: torch.Tensor
    tile_expert: torch.Tensor
    tile_start: torch.Tensor
    tile_end: torch.Tensor
    places: int


def expert_layout(
    ids: torch.Tensor, num_experts: int, block_m: int, *, capacity: int | None = None
) -> ExpertLayout:
    """Lay out the rows of `ids` [rows] int32 by expert, without waiting for the device.

    Args:
        ids: expert of each row; others than 0 to num_experts - 1 have no place.
        num_experts: E.
        block_m: rows of a GEMM tile.
        capacity: places of each expert (the masked layout); None puts them one after the other.
    """
    rows = ids.numel()
    masked = capacity is not None
    places = num_experts * capacity if capacity is not None else rows
    if capacity is not None:
        tiles = num_experts * triton.cdiv(capacity, block_m)
    else:
        tiles = rows // block_m + num_experts
    order = torch.empty(places, dtype=torch.int32, device=ids.device)
    expert, start, end = torch.empty((3, tiles), dtype=torch.int32, device=ids.device)
    block, warps = next(pick for most, *pick in SORT_BLOCKS if rows <= most or most == 0)
    _expert_layout_kernel[(num_experts,)](
        ids,
        order,
        expert,
        start,
        end,
        rows,
        capacity or 0,
        tiles,
        MASKED=masked,
        BLOCK_M=block_m,
        BLOCK=block,
        num_warps=warps,
    )
    return ExpertLayout(order, expert, start, end, places)
