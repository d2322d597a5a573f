"""Interleaved rotary in Triton, elementwise: one program a token and a few heads.

Two kernels with equal bits: one writes a new tensor, one turns the last columns where they stand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.interleaved_rotary.spec import HEADS, NUM_WARPS


# The launcher aligns what Triton specializes on.
@triton.jit(
    do_not_specialize=["heads", "max_position"], do_not_specialize_on_alignment=["positions_ptr"]
)
def _interleaved_rotary_fwd_kernel(
    positions_ptr,  # [T]
    x_ptr,  # [T, heads, D], strides x_stride, head_stride
    cos_ptr,  # [max_position, HALF] fp32
    sin_ptr,  # [max_position, HALF] fp32
    out_ptr,  # [T, heads, D] contiguous
    x_stride,
    head_stride,
    heads,
    max_position,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_D)
    rotated = column - (D - 2 * HALF)
    is_rotated = (rotated >= 0) & (column < D)
    position = tl.load(positions_ptr + token).to(tl.int64)
    # A padded graph row may hold any position and must not read outside the table; a real token
    # out there turns NaN, which no log-prob hides.
    known = is_rotated & (position >= 0) & (position < max_position)
    at = position * HALF + rotated // 2
    cos = tl.load(cos_ptr + at, mask=known, other=float("nan"))
    sin = tl.load(sin_ptr + at, mask=known, other=float("nan"))
    # y[2i] takes -sin of its partner, y[2i + 1] takes +sin; the inverse turns both around.
    is_added = (rotated % 2 == 1) != INVERSE
    row = x_ptr + token * x_stride + head[:, None] * head_stride
    inside = (head < heads)[:, None] & (column < D)[None, :]
    x = tl.load(row + column[None, :], mask=inside, other=0.0)
    partner = tl.load(row + (column ^ 1)[None, :], mask=inside & is_rotated[None, :], other=0.0).to(
        tl.float32
    )
    # Subtracted, not added negated: Triton negates by 0 - sin, which is +0 at position 0.
    own, other = x.to(tl.float32) * cos[None, :], partner * sin[None, :]
    turned = tl.where(is_added[None, :], own + other, own - other)
    out = tl.where(is_rotated[None, :], turned.to(x.dtype), x)
    target = out_ptr + (token * heads + head)[:, None] * D + column[None, :]
    tl.store(target, out, mask=inside)


def interleaved_rotary_fwd(
    positions: torch.Tensor,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: bool,
) -> torch.Tensor:
    """Launch the kernel; see `interleaved_rotary_ref`."""
    tokens, heads, width = x.shape
    strided = x.stride(2) == 1 and x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0
    if not strided or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    out = torch.empty((tokens, heads, width), dtype=x.dtype, device=x.device)
    if tokens:
        _interleaved_rotary_fwd_kernel[(tokens, triton.cdiv(heads, HEADS))](
            positions.contiguous(), x, cos, sin, out, x.stride(0), x.stride(1), heads, cos.shape[0],
            D=width, HALF=cos.shape[1], BLOCK_D=triton.next_power_of_2(width), HEADS=HEADS,
            INVERSE=inverse, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["heads", "max_position"], do_not_specialize_on_alignment=["positions_ptr"]
)
def _interleaved_rotary_in_place_kernel(
    positions_ptr,  # [T]
    x_ptr,  # [T, heads, D], strides x_stride, head_stride; its last 2 * HALF columns are turned
    cos_ptr,  # [max_position, HALF] fp32
    sin_ptr,  # [max_position, HALF] fp32
    x_stride,
    head_stride,
    heads,
    max_position,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + token).to(tl.int64)
    known = (pair < HALF) & (position >= 0) & (position < max_position)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=known, other=float("nan"))[None, :]
    sin = tl.load(sin_ptr + position * HALF + pair, mask=known, other=float("nan"))[None, :]
    # One thread holds both elements of a pair, so none is overwritten before it is read.
    row = x_ptr + token * x_stride + head[:, None] * head_stride + (D - 2 * HALF)
    column = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    inside = (head < heads)[:, None] & (column < 2 * HALF)
    x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (HEADS, BLOCK_HALF, 2)))
    turned_even = even * cos + odd * sin if INVERSE else even * cos - odd * sin
    turned_odd = odd * cos - even * sin if INVERSE else odd * cos + even * sin
    turned = tl.reshape(tl.join(turned_even, turned_odd), (HEADS, 2 * BLOCK_HALF))
    tl.store(row + column, turned.to(x_ptr.dtype.element_ty), mask=inside)


def interleaved_rotary_in_place(
    positions: torch.Tensor,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: bool,
) -> None:
    """Launch the kernel over x [T, heads, D], whose columns are contiguous and rows aligned."""
    tokens, heads, width = x.shape
    half = cos.shape[1]
    if tokens:
        _interleaved_rotary_in_place_kernel[(tokens, triton.cdiv(heads, HEADS))](
            positions.contiguous(), x, cos, sin, x.stride(0), x.stride(1), heads, cos.shape[0],
            D=width, HALF=half, BLOCK_HALF=triton.next_power_of_2(half), HEADS=HEADS,
            INVERSE=inverse, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
