"""Grouped linear in Triton: K in ascending tiles, one fp32 accumulator an element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned
from consistent_kernels.grouped_linear.spec import (
    BLOCK_COLUMNS,
    BLOCK_K,
    BLOCK_ROWS,
    NUM_STAGES,
    NUM_WARPS,
)


# The launcher aligns every argument that Triton specializes on: it always specializes alike.
@triton.jit(do_not_specialize=["M"])
def _grouped_linear_fwd_kernel(
    x_ptr,  # [M, G, K], strides x_stride and group_stride
    w_ptr,  # [G, N, K] contiguous
    y_ptr,  # [M, G, N] contiguous
    M,
    x_stride,
    group_stride,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    row_inside, column_inside = rows < M, columns < N
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride + group * group_stride
    w_rows = w_ptr + (group * N + columns)[:, None] * K
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + inner)[None, :]
        x = tl.load(x_rows + k, mask=row_inside[:, None] & (k < K), other=0.0)
        w = tl.load(w_rows + k, mask=column_inside[:, None] & (k < K), other=0.0)
        accumulator = tl.dot(x, w.T, accumulator, input_precision="ieee")
    y = y_ptr + (rows.to(tl.int64)[:, None] * G + group) * N + columns[None, :]
    mask = row_inside[:, None] & column_inside[None, :]
    tl.store(y, accumulator.to(y_ptr.dtype.element_ty), mask=mask)


def grouped_linear_fwd(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Launch the kernel: x [M, G, K], weight [G, N, K] contiguous; returns [M, G, N]."""
    rows, groups, inner = x.shape
    columns = weight.shape[1]
    strided = x.stride(2) == 1 and x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0
    if not strided or x.data_ptr() % 16:
        padded = x.new_empty((rows, groups, -(-inner // 16) * 16))[..., :inner]
        x = padded.copy_(x)
    y = torch.empty((rows, groups, columns), dtype=x.dtype, device=x.device)
    if rows:
        grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLUMNS), groups)
        _grouped_linear_fwd_kernel[grid](
            x, aligned(weight), y, rows, x.stride(0), x.stride(1), G=groups, N=columns, K=inner,
            BLOCK_M=BLOCK_ROWS, BLOCK_N=BLOCK_COLUMNS, BLOCK_K=BLOCK_K,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip
    return y
