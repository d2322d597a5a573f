"""Quantized rows on their way to the places of DeepGEMM's grouped GEMMs, in Triton.

What moves rows copies bits; what activates and quantizes them does it as `silu_and_mul` and
`quantize_rows` do. Only rows that exist are touched, whatever the number of places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.experts import deep_gemm_places
from consistent_kernels.experts.deep_gemm_places import (
    NO_PLACE_LEFT,
    PLACE_ALIGNMENT,
    AnyPlaces,
    Places,
)
from consistent_kernels.experts.triton_activation import gated_activation
from consistent_kernels.quantization.spec import GROUP
from consistent_kernels.quantization.triton import quantized_groups

Quantized = tuple[torch.Tensor, torch.Tensor]
"""(values [places, K] float8_e4m3fn, column-major scale [places, G] or [E, capacity, G] fp32)."""

PLACED_ROWS = 1024
"""Rows (tokens times slots) up to which each one looks for its place by itself."""

_GROUPS = 16
_NUM_WARPS = 4
ACTIVATION_GROUPS = 4
ACTIVATION_WARPS = 4


@triton.jit
def _scales_at(s_ptr, place, groups, s_places, GROUPS: tl.constexpr):
    # Scales stand column by column, in one part or, in the masked layout, in one part an expert.
    first = (place // s_places) * s_places * GROUPS + place % s_places
    return s_ptr + first + groups.to(tl.int64) * s_places


@triton.jit(do_not_specialize=["s_row_stride", "s_column_stride", "s_places"])
def _to_places_kernel(
    q_ptr,  # [T, K] bytes
    s_ptr,  # [T, GROUPS]
    place_ptr,  # [T * SLOTS]
    out_ptr,  # [places, K] bytes
    out_scale_ptr,  # see _scales_at
    s_row_stride,
    s_column_stride,
    s_places,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.load(place_ptr + row).to(tl.int64)
    if place < 0:
        return
    token = (row // SLOTS).to(tl.int64)
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK * GROUP + tl.arange(0, BLOCK * GROUP)
    q = tl.load(q_ptr + token * K + columns, mask=columns < K)
    tl.store(out_ptr + place * K + columns, q, mask=columns < K)
    s_at = s_ptr + token * s_row_stride + groups.to(tl.int64) * s_column_stride
    scale = tl.load(s_at, mask=groups < GROUPS)
    out_at = _scales_at(out_scale_ptr, place, groups, s_places, GROUPS)
    tl.store(out_at, scale, mask=groups < GROUPS)


@triton.jit
def _quantize_row(
    row_ptr,  # [K]
    place,
    q_ptr,  # [places, K] bytes
    s_ptr,  # see _scales_at
    s_places,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
):
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < K
    x = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    values, scale = quantized_groups(x, BLOCK, GROUP, UE8M0)
    tl.store(q_ptr + place * K + columns, values, mask=inside)
    s_at = _scales_at(s_ptr, place, groups, s_places, GROUPS)
    tl.store(s_at, scale, mask=groups < GROUPS)


# x_stride is a multiple of 16: it always specializes alike.
@triton.jit(do_not_specialize=["s_places"])
def _quantize_to_places_kernel(
    x_ptr,  # [T, K], row stride x_stride
    place_ptr,  # [T * SLOTS]
    q_ptr,
    s_ptr,
    x_stride,
    s_places,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.load(place_ptr + row).to(tl.int64)
    if place < 0:
        return
    row_ptr = x_ptr + (row // SLOTS).to(tl.int64) * x_stride
    _quantize_row(row_ptr, place, q_ptr, s_ptr, s_places, K, GROUPS, BLOCK, GROUP, UE8M0)


# x_stride is a multiple of 16: it always specializes alike.
@triton.jit(do_not_specialize=["rows", "capacity"])
def _place_and_quantize_kernel(
    x_ptr,  # [T, K], row stride x_stride
    ids_ptr,  # [rows]
    place_ptr,  # [rows], as _expert_places_kernel writes it, like the next two
    expert_ptr,  # [E * capacity]
    count_ptr,  # [E]
    q_ptr,
    s_ptr,
    x_stride,
    rows,
    capacity,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
    OVERFLOW: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    # Every row counts the rows before it, every expert its own: none waits for another.
    program = tl.program_id(0)
    lane = tl.arange(0, ROWS)
    ids = tl.load(ids_ptr + lane, mask=lane < rows, other=-1)
    first_columns = tl.program_id(1) == 0
    if first_columns & (program < E):
        own = tl.minimum(tl.sum((ids == program).to(tl.int32), 0), capacity)
        tl.store(count_ptr + program, own)
        for start in range(0, capacity, ALIGNMENT):
            at = start + tl.arange(0, ALIGNMENT)
            tl.store(expert_ptr + program * capacity + at, tl.where(at < own, program, -1))
    if program >= rows:
        return
    expert = tl.load(ids_ptr + program)
    rank = tl.sum(((ids == expert) & (lane < program)).to(tl.int32), 0)
    place = tl.where(rank < capacity, expert * capacity + rank, OVERFLOW)
    place = tl.where((expert >= 0) & (expert < E), place, -1)
    if first_columns:
        tl.store(place_ptr + program, place)
    if place < 0:
        return
    row_ptr = x_ptr + (program // SLOTS).to(tl.int64) * x_stride
    _quantize_row(
        row_ptr, place.to(tl.int64), q_ptr, s_ptr, capacity, K, GROUPS, BLOCK, GROUP, UE8M0
    )


@triton.jit(do_not_specialize=["limit", "s_places"])
def _activate_and_quantize_kernel(
    x_ptr,  # [places, 2 WIDTH]: gate, then up
    place_ptr,  # [T * slots]
    q_ptr,  # [places, WIDTH] bytes
    s_ptr,  # see _scales_at
    limit,
    s_places,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
):
    place = tl.load(place_ptr + tl.program_id(0)).to(tl.int64)
    if place < 0:
        return
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < WIDTH
    row = x_ptr + place * (2 * WIDTH)
    gate = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    hidden = gated_activation(gate, up, limit, HAS_LIMIT)
    hidden = hidden.to(x_ptr.dtype.element_ty).to(tl.float32)
    values, scale = quantized_groups(hidden, BLOCK, GROUP, UE8M0)
    tl.store(q_ptr + place * WIDTH + columns, values, mask=inside)
    s_at = _scales_at(s_ptr, place, groups, s_places, GROUPS)
    tl.store(s_at, scale, mask=groups < GROUPS)


def empty_places(places: AnyPlaces, columns: int) -> Quantized:
    """Return an uninitialized `Quantized` for these places."""
    rows, device = places.size, places.place.device
    values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    groups = triton.cdiv(columns, GROUP)
    scale = torch.empty(rows * groups, device=device, dtype=torch.float32)
    capacity = places.capacity if isinstance(places, Places) else None
    if capacity is None:
        return values, scale.as_strided((rows, groups), (1, rows))
    shape = (rows // capacity, capacity, groups)
    return values, scale.as_strided(shape, (capacity * groups, 1, capacity))


def _grid(rows: int, columns: int, most: int = _GROUPS) -> tuple[tuple[int, int], int]:
    groups = triton.cdiv(columns, GROUP)
    block = min(triton.next_power_of_2(groups), most)
    return (rows, triton.cdiv(groups, block)), block


def to_places(values: torch.Tensor, scale: torch.Tensor, places: Places, slots: int) -> Quantized:
    """Copy quantized tokens to the places of their slots; other places stay uninitialized.

    Args:
        values: [T, K] float8_e4m3fn contiguous; scale: [T, G] fp32, any strides.
        places: of T * slots rows.
    """
    columns = values.shape[1]
    out = empty_places(places, columns)
    grid, block = _grid(places.place.numel(), columns)
    _to_places_kernel[grid](
        values.view(torch.uint8),
        scale,
        places.place,
        out[0].view(torch.uint8),
        out[1],
        scale.stride(0),
        scale.stride(1),
        out[1].stride(-1),
        SLOTS=slots,
        K=columns,
        GROUPS=scale.shape[1],
        BLOCK=block,
        GROUP=GROUP,
        num_warps=_NUM_WARPS,
    )
    return out


def quantize_to_places(x: torch.Tensor, places: Places, slots: int, scale_format: str) -> Quantized:
    """`to_places` of `quantize_rows`, in one launch, which quantizes a token once a slot.

    Args:
        x: [T, K] bf16, aligned rows of unit column stride.
        places: of T * slots rows.
    """
    columns = x.shape[1]
    out = empty_places(places, columns)
    grid, block = _grid(places.place.numel(), columns)
    _quantize_to_places_kernel[grid](
        x,
        places.place,
        out[0].view(torch.uint8),
        out[1],
        x.stride(0),
        out[1].stride(-1),
        SLOTS=slots,
        K=columns,
        GROUPS=out[1].shape[-1],
        BLOCK=block,
        GROUP=GROUP,
        UE8M0=scale_format == "ue8m0",
        num_warps=_NUM_WARPS,
    )
    return out


def place_and_quantize(
    x: torch.Tensor, ids: torch.Tensor, num_experts: int, scale_format: str
) -> tuple[Quantized, Places]:
    """`expert_places(ids, num_experts, masked=True)` and `quantize_to_places`, in one launch.

    Args:
        x: [T, K] bf16, aligned rows of unit column stride.
        ids: [T, slots] int32 contiguous, at most PLACED_ROWS rows; distinct in a token.
    """
    columns, rows = x.shape[1], ids.numel()
    places = deep_gemm_places.empty_places(ids, num_experts, masked=True)
    out = empty_places(places, columns)
    (_, column_blocks), block = _grid(rows, columns)
    _place_and_quantize_kernel[(max(rows, num_experts), column_blocks)](
        x,
        ids,
        places.place,
        places.expert,
        places.count,
        out[0].view(torch.uint8),
        out[1],
        x.stride(0),
        rows,
        places.capacity,
        E=num_experts,
        SLOTS=ids.shape[1],
        K=columns,
        GROUPS=out[1].shape[-1],
        BLOCK=block,
        GROUP=GROUP,
        UE8M0=scale_format == "ue8m0",
        OVERFLOW=NO_PLACE_LEFT,
        ROWS=PLACED_ROWS,
        ALIGNMENT=PLACE_ALIGNMENT,
        num_warps=_NUM_WARPS,
    )
    return out, places


def activate_and_quantize(
    gate_up: torch.Tensor, places: AnyPlaces, scale_format: str, limit: float | None
) -> Quantized:
    """quantize_rows(round(silu(gate) * up)) of the places in use.

    Args:
        gate_up: [places, 2 I] bf16, gate columns before up columns.
        limit: gate <= limit and |up| <= limit before the product, or None.
    """
    width = gate_up.shape[1] // 2
    out = empty_places(places, width)
    grid, block = _grid(places.place.numel(), width, ACTIVATION_GROUPS)
    _activate_and_quantize_kernel[grid](
        gate_up,
        places.place,
        out[0].view(torch.uint8),
        out[1],
        0.0 if limit is None else limit,
        out[1].stride(-1),
        WIDTH=width,
        GROUPS=out[1].shape[-1],
        BLOCK=block,
        GROUP=GROUP,
        UE8M0=scale_format == "ue8m0",
        HAS_LIMIT=limit is not None,
        num_warps=ACTIVATION_WARPS,
        enable_fp_fusion=False,
    )
    return out
