"""RMSNorm in Triton: one program a row, so no row sees another; the sum is a written-down tree."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.rms_norm.spec import NUM_WARPS
from consistent_kernels.triton_tree import halving_tree_sum


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
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
        total = (x + residual.to(tl.float32)).to(y_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * H + columns, total, mask=inside)
        x = total.to(tl.float32)
    square_sum = halving_tree_sum(x * x, BLOCK, LEVELS)
    mean = tl.div_rn(square_sum, tl.full((1,), H, tl.float32))
    rstd = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.broadcast_to(rstd, (BLOCK,)) * weight
    tl.store(y_ptr + row * H + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


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
    block = triton.next_power_of_2(size)
    x, weight = aligned_rows(x), aligned(weight)
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
            BLOCK=block,
            LEVELS=block.bit_length() - 1,
            HAS_RESIDUAL=residual is not None,
            num_warps=NUM_WARPS,
            # A product folded into a sum would round differently with and without a residual.
            enable_fp_fusion=False,
        )
    return y, total
