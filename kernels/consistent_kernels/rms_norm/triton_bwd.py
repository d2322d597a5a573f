"""Gradients of RMSNorm in Triton: each tensor is read or written once, no atomics.

Rows are dealt out to programs in turn; each adds its rows' share of the weight's gradient in fp32,
and the shares are added afterwards. That order follows the number of rows alone, so gradients
repeat bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows

_TILE = 4096
"""Elements of one step: short rows are taken some at once."""

_PROGRAMS = 1024
"""At most so many programs, each of which leaves one row of partial sums of the weight."""


@triton.jit(do_not_specialize=["eps", "rows", "programs"])
def _rms_norm_bwd_kernel(
    grad_y_ptr,  # [rows, H], row stride grad_y_stride
    x_ptr,  # [rows, H], row stride x_stride
    weight_ptr,  # [H]
    grad_sum_ptr,  # [rows, H], row stride grad_sum_stride, or unused
    grad_x_ptr,  # [rows, H] contiguous
    partial_ptr,  # [programs, H] fp32
    grad_y_stride,
    x_stride,
    grad_sum_stride,
    eps,
    rows,
    programs,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SUM: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    share = tl.zeros((COLUMNS,), tl.float32)
    size = tl.full((ROWS,), H, tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < H)[None, :]
        at = row[:, None] * x_stride + column[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        at = row[:, None] * grad_y_stride + column[None, :]
        grad_y = tl.load(grad_y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.div_rn(tl.sum(x * x, 1), size)
        rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]
        normalized = x * rstd
        weighted = grad_y * weight[None, :]
        dot = tl.div_rn(tl.sum(weighted * normalized, 1), size)[:, None]
        grad_x = rstd * (weighted - normalized * dot)
        if HAS_SUM:
            at = row[:, None] * grad_sum_stride + column[None, :]
            grad_x += tl.load(grad_sum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        at = row[:, None] * H + column[None, :]
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        share += tl.sum(grad_y * normalized, 0)
    at = program.to(tl.int64) * H + column
    tl.store(partial_ptr + at, share, mask=column < H)


def rms_norm_bwd(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    grad_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on 2-D rows; formula as in `reference.rms_norm_bwd_ref`.

    Args:
        grad_y, x, grad_sum: [rows, H]; weight: [H].

    Returns:
        (grad_x [rows, H] in the dtype of x, grad_weight [H] fp32).
    """
    rows, size = x.shape
    columns = triton.next_power_of_2(size)
    tile = max(1, _TILE // columns)
    programs = min(_PROGRAMS, triton.cdiv(rows, tile))
    x, grad_y, weight = aligned_rows(x), aligned_rows(grad_y), aligned(weight.contiguous())
    grad_sum = None if grad_sum is None else aligned_rows(grad_sum)
    grad_x = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    partial = torch.empty((programs, size), dtype=torch.float32, device=x.device)
    if rows:
        _rms_norm_bwd_kernel[(programs,)](
            grad_y,
            x,
            weight,
            x if grad_sum is None else grad_sum,
            grad_x,
            partial,
            grad_y.stride(0),
            x.stride(0),
            0 if grad_sum is None else grad_sum.stride(0),
            eps,
            rows,
            programs,
            H=size,
            ROWS=tile,
            COLUMNS=columns,
            HAS_SUM=grad_sum is not None,
            num_warps=4 if columns <= 1024 else 8,
        )
    return grad_x, partial.sum(0)
