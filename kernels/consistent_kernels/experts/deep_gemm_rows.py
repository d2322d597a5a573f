"""Rows on their way to and from the places of DeepGEMM's grouped GEMMs, in Triton.

What moves rows copies bits; the activation is the one of `experts`. Only rows that exist are
touched, whatever the number of places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.experts.deep_gemm_places import NO_PLACE_LEFT, AnyPlaces, Places
from consistent_kernels.experts.spec import COMBINE_BLOCK, NUM_WARPS
from consistent_kernels.experts.triton_activation import gated_activation

_COLUMNS = 1024
_NUM_WARPS = 4


# x_stride is a multiple of 16: it always specializes alike.
@triton.jit
def _to_places_kernel(
    x_ptr,  # [T, K], row stride x_stride
    place_ptr,  # [T * SLOTS]
    out_ptr,  # [places, K]
    x_stride,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.load(place_ptr + row).to(tl.int64)
    if place < 0:
        return
    token = (row // SLOTS).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * x_stride + columns, mask=columns < K)
    tl.store(out_ptr + place * K + columns, x, mask=columns < K)


@triton.jit(do_not_specialize=["limit"])
def _activate_kernel(
    x_ptr,  # [places, 2 WIDTH]: gate, then up
    place_ptr,  # [T * slots]
    out_ptr,  # [places, WIDTH]
    limit,
    WIDTH: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.load(place_ptr + tl.program_id(0)).to(tl.int64)
    if place < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = x_ptr + place * (2 * WIDTH)
    gate = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    hidden = gated_activation(gate, up, limit, HAS_LIMIT)
    tl.store(out_ptr + place * WIDTH + columns, hidden.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _from_places_kernel(
    x_ptr,  # [places, H]
    place_ptr,  # [T * slots]
    y_ptr,  # [T * slots, H]
    H: tl.constexpr,
    OVERFLOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(place_ptr + row).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    absent = tl.where(place == OVERFLOW, float("nan"), 0.0)
    x = tl.load(x_ptr + place * H + columns, mask=(columns < H) & (place >= 0), other=absent)
    tl.store(y_ptr + row * H + columns, x, mask=columns < H)


@triton.jit
def _combine_places_kernel(
    x_ptr,  # [places, H]
    place_ptr,  # [T * K]
    weights_ptr,  # [T, K] fp32 contiguous
    shared_ptr,  # [T, H], row stride shared_stride, or unused
    out_ptr,  # [T, H]
    shared_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    OVERFLOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        place = tl.load(place_ptr + token * K + slot).to(tl.int64)
        weight = tl.load(weights_ptr + token * K + slot)
        absent = tl.where(place == OVERFLOW, float("nan"), 0.0)
        x = tl.load(x_ptr + place * H + columns, mask=inside & (place >= 0), other=absent)
        total += tl.where(place == -1, 0.0, weight * x.to(tl.float32))
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * shared_stride + columns, mask=inside, other=0.0)
        total += shared.to(tl.float32)
    tl.store(out_ptr + token * H + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def to_places(x: torch.Tensor, places: Places, slots: int) -> torch.Tensor:
    """Copy tokens [T, K] to the places of their slots; other places stay uninitialized.

    Args:
        x: aligned rows of unit column stride.
        places: of T * slots rows.
    """
    columns = x.shape[1]
    out = torch.empty((places.expert.numel(), columns), dtype=x.dtype, device=x.device)
    grid = (places.place.numel(), triton.cdiv(columns, _COLUMNS))
    _to_places_kernel[grid](
        x, places.place, out, x.stride(0), SLOTS=slots, K=columns, BLOCK=_COLUMNS,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return out


def activate(gate_up: torch.Tensor, places: Places, limit: float | None) -> torch.Tensor:
    """round(silu(gate) * up) of the places in use; other places stay uninitialized.

    Args:
        gate_up: [places, 2 I], gate columns before up columns.
        limit: gate <= limit and |up| <= limit before the product, or None.
    """
    width = gate_up.shape[1] // 2
    out = torch.empty((gate_up.shape[0], width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (places.place.numel(), triton.cdiv(width, _COLUMNS))
    _activate_kernel[grid](
        gate_up,
        places.place,
        out,
        0.0 if limit is None else limit,
        WIDTH=width,
        HAS_LIMIT=limit is not None,
        BLOCK=_COLUMNS,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )
    return out


def from_places(x: torch.Tensor, places: AnyPlaces) -> torch.Tensor:
    """Copy [places, H] back to the rows [T * slots, H]; rows that went nowhere are zero.

    A row for which its expert had no place left is NaN.
    """
    rows, columns = places.place.numel(), x.shape[1]
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    _from_places_kernel[(rows, triton.cdiv(columns, _COLUMNS))](
        x,
        places.place,
        y,
        H=columns,
        OVERFLOW=NO_PLACE_LEFT,
        BLOCK=_COLUMNS,
        num_warps=_NUM_WARPS,
    )
    return y


def combine_places(
    x: torch.Tensor, places: AnyPlaces, weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """`combine` of `from_places`, in one launch: [T, H].

    Args:
        x: [places, H].
        weights: [T, K] fp32.
        shared: [T, H] in the dtype of x, or None.
    """
    tokens, slots = weights.shape
    columns = x.shape[1]
    out = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    if shared is not None:
        shared = aligned_rows(shared)
    _combine_places_kernel[(tokens, triton.cdiv(columns, COMBINE_BLOCK))](
        x,
        places.place,
        aligned(weights.contiguous()),
        shared if shared is not None else x,
        out,
        shared.stride(0) if shared is not None else 0,
        H=columns,
        K=slots,
        HAS_SHARED=shared is not None,
        OVERFLOW=NO_PLACE_LEFT,
        BLOCK=COMBINE_BLOCK,
        num_warps=NUM_WARPS,
        # The spec rounds each product: no fma.
        enable_fp_fusion=False,
    )
    return out
