"""Few rows an expert on Hopper: experts stand close together, in tiles of 16, 32 or 64 rows.

A masked tile holds 64 rows, of which a decode step fills four or so. DeepGEMM's psum layout walks
the ends of the experts on the device and takes a tile as high as experts are aligned: fewer places
to read and to write, and none that stands for an expert without rows. A row's bits are the same;
the start probe compares them with those of the contiguous layout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.experts.deep_gemm_places import PackedPlaces, place_packed
from consistent_kernels.fp8_experts.deep_gemm_rows import Quantized, empty_places
from consistent_kernels.quantization.spec import GROUP
from consistent_kernels.quantization.triton import quantized_groups

PACKED_ROWS = 2048
"""Rows (tokens times slots) up to which "fastest" is packed."""

COUNTED_ROWS = 512
"""Rows up to which every program counts all of them; above it a launch before counts them once."""

ALIGNMENTS = (16, 32, 64)
"""Rows of a tile, the shortest that holds twice the rows of an expert on average."""

GROUPS_PER_PROGRAM = 8
NUM_WARPS = 8
SCATTER_WARPS = 4
_FEWEST = 128


def alignment_of(rows: int, num_experts: int) -> int:
    """Return the rows of a tile where `rows` rows fall among so many experts."""
    enough = (size for size in ALIGNMENTS if 2 * rows <= size * num_experts)
    return next(enough, ALIGNMENTS[-1])


def packed_places(rows: int, num_experts: int) -> int:
    """Return how many places `rows` rows need at most, however they fall among the experts."""
    alignment, filled = alignment_of(rows, num_experts), min(rows, num_experts)
    return ((rows - filled) // alignment + filled) * alignment


@triton.jit
def _quantize_token(
    x_row,  # [K]
    place,  # [LANES], -1 where a row goes nowhere
    q_ptr,  # [places, K] bytes
    s_ptr,  # [GROUPS, places]: column by column
    places,
    LANES: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
):
    # A part of a token is quantized once and written to all of its places.
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_row + columns, mask=columns < K, other=0.0).to(tl.float32)
    values, scale = quantized_groups(x, BLOCK, GROUP, UE8M0)
    line = q_ptr + place.to(tl.int64)[:, None, None] * K + columns[None, :, :]
    inside = (place >= 0)[:, None, None] & (columns < K)[None, :, :]
    tl.store(line, tl.broadcast_to(values[None, :, :], (LANES, BLOCK, GROUP)), mask=inside)
    s_at = s_ptr + groups[None, :].to(tl.int64) * places + place[:, None]
    s_inside = (place >= 0)[:, None] & (groups < GROUPS)[None, :]
    tl.store(s_at, tl.broadcast_to(scale[None, :], (LANES, BLOCK)), mask=s_inside)


# x_stride is a multiple of 16: it always specializes alike.
@triton.jit(do_not_specialize=["places"])
def _quantize_packed_kernel(
    x_ptr,  # [T, K], row stride x_stride
    place_ptr,  # [T * SLOTS], -1 where a row goes nowhere
    q_ptr,
    s_ptr,
    x_stride,
    places,
    SLOTS: tl.constexpr,
    LANES: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.arange(0, LANES)
    place = tl.load(place_ptr + token * SLOTS + slot, mask=slot < SLOTS, other=-1)
    x_row = x_ptr + token.to(tl.int64) * x_stride
    _quantize_token(x_row, place, q_ptr, s_ptr, places, LANES, K, GROUPS, BLOCK, GROUP, UE8M0)


# x_stride is a multiple of 16: it always specializes alike.
@triton.jit(do_not_specialize=["tokens", "places"])
def _pack_and_quantize_kernel(
    x_ptr,  # [T, K], row stride x_stride
    ids_ptr,  # [T * SLOTS]
    place_ptr,  # [T * SLOTS], -1 where a row goes nowhere
    end_ptr,  # [E] place behind an expert's last row
    q_ptr,
    s_ptr,
    x_stride,
    tokens,
    places,
    E: tl.constexpr,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    LANES: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    # A program counts the rows of every expert itself, so none waits for another.
    token = tl.program_id(0)
    row = tl.arange(0, ROWS)
    ids = tl.load(ids_ptr + row, mask=row < tokens * SLOTS, other=-1)
    goes = (ids >= 0) & (ids < E)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(ids, BINS, mask=goes)
    aligned = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    if (token == 0) & (tl.program_id(1) == 0):
        first = tl.cumsum(aligned, 0) - aligned
        tl.store(end_ptr + bins, first + counts, mask=bins < E)
    slot = tl.arange(0, LANES)
    own = token * SLOTS + slot
    expert = tl.load(ids_ptr + own, mask=slot < SLOTS, other=-1)
    lower = bins[None, :] < expert[:, None]
    first = tl.sum(tl.where(lower, aligned[None, :], 0), 1)
    before = (ids[None, :] == expert[:, None]) & (row[None, :] < own[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    place = tl.where((expert >= 0) & (expert < E), first + rank, -1)
    if tl.program_id(1) == 0:
        tl.store(place_ptr + own, place, mask=slot < SLOTS)
    x_row = x_ptr + token.to(tl.int64) * x_stride
    _quantize_token(x_row, place, q_ptr, s_ptr, places, LANES, K, GROUPS, BLOCK, GROUP, UE8M0)


def pack(ids: torch.Tensor, num_experts: int) -> PackedPlaces:
    """Return the places of `pack_and_quantize`, in plain PyTorch; it waits for the device.

    Args:
        ids: [T, slots] int32; others than 0 to num_experts - 1 have no place.
    """
    rows, alignment = ids.numel(), alignment_of(ids.numel(), num_experts)
    flat = ids.flatten().long()
    goes = (flat >= 0) & (flat < num_experts)
    bins = torch.where(goes, flat, num_experts)
    counts = torch.bincount(bins, minlength=num_experts + 1)[:-1]
    aligned = (counts + alignment - 1) // alignment * alignment
    first = aligned.cumsum(0) - aligned
    end = (first + counts).int()
    order = bins.argsort(stable=True)[: int(counts.sum())]
    among = (
        torch.arange(order.numel(), device=ids.device) - (counts.cumsum(0) - counts)[bins[order]]
    )
    place = torch.full((rows,), -1, dtype=torch.int32, device=ids.device)
    place[order] = (first[bins[order]] + among).int()
    return PackedPlaces(place, end, packed_places(rows, num_experts), alignment)


def pack_and_quantize(
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    scale_format: str,
) -> tuple[Quantized, PackedPlaces]:
    """Quantize tokens into the places of their slots: experts in order, rows in order in each.

    Args:
        x: [T, K] bf16, aligned rows of unit column stride.
        ids: [T, slots] int32 contiguous, at most PACKED_ROWS rows; others than 0 to
            num_experts - 1 have no place.

    Returns:
        (values and scale, places): expert e stands from a multiple of `alignment_of` on, behind the
        last tile of the expert before it. What is behind its rows stays uninitialized.
    """
    (tokens, columns), slots = x.shape, ids.shape[1]
    rows = ids.numel()
    place, end = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (rows, num_experts)
    )
    alignment = alignment_of(rows, num_experts)
    places = PackedPlaces(place, end, packed_places(rows, num_experts), alignment)
    out = empty_places(places, columns)
    groups = out[1].shape[1]
    block = min(triton.next_power_of_2(groups), GROUPS_PER_PROGRAM)
    options = {
        "SLOTS": slots,
        "LANES": triton.next_power_of_2(slots),
        "K": columns,
        "GROUPS": groups,
        "BLOCK": block,
        "GROUP": GROUP,
        "UE8M0": scale_format == "ue8m0",
    }
    grid, q = (tokens, triton.cdiv(groups, block)), out[0].view(torch.uint8)
    if rows > COUNTED_ROWS:
        place_packed(ids, places)
        _quantize_packed_kernel[grid](
            x, place, q, out[1], x.stride(0), places.size, **options, num_warps=SCATTER_WARPS
        )
        return out, places
    _pack_and_quantize_kernel[grid](
        x,
        ids,
        place,
        end,
        q,
        out[1],
        x.stride(0),
        tokens,
        places.size,
        E=num_experts,
        BINS=triton.next_power_of_2(num_experts),
        ROWS=max(triton.next_power_of_2(rows), _FEWEST),
        ALIGNMENT=alignment,
        **options,
        num_warps=NUM_WARPS,
    )
    return out, places
