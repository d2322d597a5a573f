"""RMSNorm in Triton: one program a row, so no row sees another; the sum is a written-down tree."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.rms_norm.spec import LANES, num_warps
from consistent_kernels.triton_tree import halving_tree_sum_by_pairs


# The launcher aligns every argument that Triton specializes on: it always specializes alike.
@triton.jit(do_not_specialize=["eps"])
def _rms_norm_fwd_kernel(
    x_ptr,  # [rows, H], row stride x_stride
    residual_ptr,  # [rows, H] or unused
    weight_ptr,  # [H]
    y_ptr,  # [rows, H] contiguous
    sum_ptr,  # [rows, H] contiguous or unused
    x_stride,
    residual_stride,
    eps,
    H: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    dtype = y_ptr.dtype.element_ty
    # All loads first, the weights too: an addition after each would wait for its load, chunk by
    # chunk, and no load may pass a store.
    xs = ()
    for first in tl.static_range(0, H, LANES):
        inside = first + lane < H
        x = tl.load(x_ptr + row * x_stride + first + lane, mask=inside, other=0.0)
        xs = xs + (x.to(tl.float32),)  # noqa: RUF005 - Triton knows no unpacking
    weights = ()
    for first in tl.static_range(0, H, LANES):
        inside = first + lane < H
        weights = weights + (tl.load(weight_ptr + first + lane, mask=inside, other=0.0),)  # noqa: RUF005
    if HAS_RESIDUAL:
        sums = ()
        for first in tl.static_range(0, H, LANES):
            inside = first + lane < H
            at = residual_ptr + row * residual_stride + first + lane
            other = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            sums = sums + ((xs[first // LANES] + other).to(dtype).to(tl.float32),)  # noqa: RUF005
        xs = sums
    squares = tl.zeros((LANES,), tl.float32)
    for first in tl.static_range(0, H, LANES):
        x = xs[first // LANES]
        squares += x * x
    square_sum = halving_tree_sum_by_pairs(squares, LANES, LEVELS)
    mean = tl.div_rn(tl.full((1,), square_sum, tl.float32), tl.full((1,), H, tl.float32))
    rstd = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    for first in tl.static_range(0, H, LANES):
        inside = first + lane < H
        x = xs[first // LANES]
        if HAS_RESIDUAL:
            tl.store(sum_ptr + row * H + first + lane, x.to(dtype), mask=inside)
        y = x * tl.broadcast_to(rstd, (LANES,)) * weights[first // LANES].to(tl.float32)
        tl.store(y_ptr + row * H + first + lane, y.to(dtype), mask=inside)


def rms_norm_fwd(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernel on 2-D rows.

    Args:
        x: [rows, H]; residual: the same or None; weight: [H].

    Returns:
        (y [rows, H], s = round(x + residual) or None).
    """
    rows, size = x.shape
    lanes = min(LANES, 1 << (size - 1).bit_length())
    x, weight = aligned_rows(x), aligned(weight.contiguous())
    residual = aligned_rows(residual) if residual is not None else None
    y = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if residual is not None else None
    if rows:
        _rms_norm_fwd_kernel[(rows,)](
            x,
            residual if residual is not None else x,
            weight,
            y,
            total if total is not None else y,
            x.stride(0),
            residual.stride(0) if residual is not None else x.stride(0),
            eps,
            H=size,
            LANES=lanes,
            LEVELS=lanes.bit_length() - 1,
            HAS_RESIDUAL=residual is not None,
            num_warps=num_warps(size),
            # A product folded into a sum would round differently with and without a residual.
            enable_fp_fusion=False,
        )
    return y, total
