"""FP8 quantization in Triton: a maximum and elementwise arithmetic, so no order to choose."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned_rows
from consistent_kernels.quantization.layout import empty_tma_aligned
from consistent_kernels.quantization.spec import (
    FP8_MAX,
    FP8_NAN,
    GROUP,
    MIN_AMAX,
    MIN_UE8M0_SCALE,
)

_FP8_MAX = tl.constexpr(FP8_MAX)
_FP8_NAN = tl.constexpr(FP8_NAN)
_MIN_AMAX = tl.constexpr(MIN_AMAX)
_MIN_UE8M0_SCALE = tl.constexpr(MIN_UE8M0_SCALE)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)

GROUPS_PER_PROGRAM = 16
"""Groups of one row that a program quantizes together."""


@triton.jit
def _group_scale(amax_bits, UE8M0: tl.constexpr):
    """Scale of groups from the int32 bits of their fp32 amax; (scale, whether it is finite).

    Bits of non-negative floats compare as the floats do, and NaN is above infinity: a maximum of
    bits keeps a NaN that a maximum of floats would lose.
    """
    finite = amax_bits < _INFINITY_BITS
    amax = tl.where(finite, amax_bits, 0).to(tl.float32, bitcast=True)
    amax = tl.maximum(amax, _MIN_AMAX)
    scale = tl.div_rn(amax, tl.full(amax.shape, _FP8_MAX, tl.float32))
    if UE8M0:
        bits = tl.maximum(scale, _MIN_UE8M0_SCALE).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    return scale, finite


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _to_fp8(scaled, finite):
    clamped = tl.minimum(tl.maximum(scaled, -_FP8_MAX), _FP8_MAX)
    bits = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(finite, bits, _FP8_NAN).to(tl.uint8)


@triton.jit
def _scaled_rows(x, scale, BLOCK: tl.constexpr, GROUP: tl.constexpr, UE8M0: tl.constexpr):
    """x [BLOCK, GROUP] / scale [BLOCK], IEEE."""
    if UE8M0:
        # The reciprocal of a power of two is exact, so this is the quotient, for less.
        inverse = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), scale)
        scaled = x * inverse[:, None]
    else:
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], (BLOCK, GROUP)))
    return scaled


@triton.jit
def _written_scale(scale, finite):
    nan = tl.full(scale.shape, _NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(finite, scale, nan)


@triton.jit
def quantized_groups(x, BLOCK: tl.constexpr, GROUP: tl.constexpr, UE8M0: tl.constexpr):
    """`quantize_rows` of x [BLOCK, GROUP] fp32, a group a line: (bytes, scale [BLOCK])."""
    scale, finite = _group_scale(tl.max(_magnitude_bits(x), 1), UE8M0)
    scaled = _scaled_rows(x, scale, BLOCK, GROUP, UE8M0)
    return _to_fp8(scaled, finite[:, None]), _written_scale(scale, finite)


@triton.jit(do_not_specialize=["s_row_stride", "s_column_stride"])
def _quantize_rows_fwd_kernel(
    x_ptr,  # [M, K], row stride x_stride, a multiple of 16
    q_ptr,  # [M, K] bytes, contiguous
    s_ptr,  # [M, ceil(K / 128)]
    x_stride,
    s_row_stride,
    s_column_stride,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < K
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    values, scale = quantized_groups(x, BLOCK, GROUP, UE8M0)
    tl.store(q_ptr + row * K + columns, values, mask=inside)
    s_at = s_ptr + row * s_row_stride + groups.to(tl.int64) * s_column_stride
    tl.store(s_at, scale, mask=groups < GROUPS)


@triton.jit(do_not_specialize=["N"])
def _quantize_blocks_fwd_kernel(
    w_ptr,  # [N, K], row stride w_stride, a multiple of 16
    q_ptr,  # [N, K] bytes, contiguous
    s_ptr,  # [ceil(N / 128), ceil(K / 128)] contiguous
    N,
    w_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    UE8M0: tl.constexpr,
):
    rows = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    columns = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    at = rows.to(tl.int64)[:, None]
    w = tl.load(w_ptr + at * w_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    amax_bits = tl.max(tl.max(_magnitude_bits(w), 1), 0)
    scale, finite = _group_scale(tl.full((1,), 0, tl.int32) + amax_bits, UE8M0)
    inverse = tl.div_rn(tl.full((1,), 1.0, tl.float32), scale)
    values = _to_fp8(w * inverse[:, None], finite[:, None])
    tl.store(q_ptr + at * K + columns[None, :], values, mask=inside)
    s_at = s_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1) + tl.arange(0, 1)
    tl.store(s_at, _written_scale(scale, finite))


def quantize_rows_fwd(
    x: torch.Tensor, scale_format: str, tma_aligned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; see `quantize_rows`.

    Args:
        x: [M, K].
        tma_aligned: lay the scales out column-major.

    Returns:
        (q [M, K] float8_e4m3fn, s [M, ceil(K / 128)] fp32).
    """
    rows, columns = x.shape
    groups = triton.cdiv(columns, GROUP)
    values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    if tma_aligned:
        scale = empty_tma_aligned(rows, groups, dtype=torch.float32, device=x.device)
    else:
        scale = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if not rows:
        return values, scale
    x = aligned_rows(x)
    block = min(triton.next_power_of_2(groups), GROUPS_PER_PROGRAM)
    _quantize_rows_fwd_kernel[(rows, triton.cdiv(groups, block))](
        x,
        values.view(torch.uint8),
        scale,
        x.stride(0),
        scale.stride(0),
        scale.stride(1),
        K=columns,
        GROUPS=groups,
        BLOCK=block,
        GROUP=GROUP,
        UE8M0=scale_format == "ue8m0",
        num_warps=4,
        enable_fp_fusion=False,
    )
    return values, scale


def quantize_blocks_fwd(
    weight: torch.Tensor, scale_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; see `quantize_blocks`.

    Args:
        weight: [N, K].

    Returns:
        (q [N, K] float8_e4m3fn, s [ceil(N / 128), ceil(K / 128)] fp32).
    """
    rows, columns = weight.shape
    down, across = triton.cdiv(rows, GROUP), triton.cdiv(columns, GROUP)
    values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty((down, across), dtype=torch.float32, device=weight.device)
    if not rows:
        return values, scale
    weight = aligned_rows(weight)
    _quantize_blocks_fwd_kernel[(down, across)](
        weight,
        values.view(torch.uint8),
        scale,
        rows,
        weight.stride(0),
        K=columns,
        GROUP=GROUP,
        UE8M0=scale_format == "ue8m0",
        num_warps=8,
        enable_fp_fusion=False,
    )
    return values, scale
