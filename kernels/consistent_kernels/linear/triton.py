"""Linear in Triton: one tile shape for every M, K ascending, one fp32 accumulator an element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.linear.spec import BLOCK_K, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_WARPS


@triton.jit(
    do_not_specialize=["M", "x_stride"],
    do_not_specialize_on_alignment=["x_ptr", "w_ptr", "bias_ptr", "y_ptr"],
)
def _linear_fwd_kernel(
    x_ptr,  # [M, K], row stride x_stride
    w_ptr,  # [N, K] contiguous
    bias_ptr,  # [N] or unused
    y_ptr,  # [M, N] contiguous
    M,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, column_inside = rows < M, columns < N
    inner = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    w_rows = w_ptr + columns.to(tl.int64)[:, None] * K
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + inner
        k_inside = k < K
        x = tl.load(x_rows + k[None, :], mask=row_inside[:, None] & k_inside[None, :], other=0.0)
        w = tl.load(w_rows + k[None, :], mask=column_inside[:, None] & k_inside[None, :], other=0.0)
        accumulator = tl.dot(x, w.T, accumulator, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=column_inside, other=0.0)
        accumulator += bias.to(tl.float32)[None, :]
    y = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = row_inside[:, None] & column_inside[None, :]
    tl.store(y, accumulator.to(y_ptr.dtype.element_ty), mask=mask)


def linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the kernel.

    Args:
        x: [M, K], unit column stride; weight: [N, K] contiguous, dtype of x; bias: [N] or None.
        out_dtype: dtype of the result.

    Returns:
        [M, N].
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    y = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    if rows:
        grid = (triton.cdiv(rows, BLOCK_M), triton.cdiv(columns, BLOCK_N))
        _linear_fwd_kernel[grid](
            x,
            weight,
            bias if bias is not None else weight,
            y,
            rows,
            x.stride(0),
            N=columns,
            K=inner,
            HAS_BIAS=bias is not None,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
    return y
