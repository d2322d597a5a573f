"""FP8 linear in Triton: for shapes that DeepGEMM does not take. One tile, K in ascending blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned
from consistent_kernels.fp8_linear.spec import (
    BLOCK_K,
    GROUP_ROWS,
    NUM_STAGES,
    NUM_WARPS,
    TILE_M,
    TILE_N,
)


@triton.jit(do_not_specialize=["M", "s_row_stride", "s_column_stride"])
def _fp8_gemm_fwd_kernel(
    x_ptr,  # [M, K] contiguous float8
    x_scale_ptr,  # [M, ceil(K / 128)]
    w_ptr,  # [N, K] contiguous float8
    w_scale_ptr,  # [ceil(N / 128), ceil(K / 128)] contiguous
    y_ptr,  # [M, N] contiguous
    M,
    s_row_stride,
    s_column_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # A tile of 128 columns has one weight scale a block of K.
    tl.static_assert(BLOCK_N == BLOCK_K)
    row_blocks = tl.cdiv(M, BLOCK_M)
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first = (tl.program_id(0) // (GROUP * column_blocks)) * GROUP
    group = min(row_blocks - first, GROUP)
    inside_group = tl.program_id(0) % (GROUP * column_blocks)
    column_block = inside_group // group
    rows = (first + inside_group % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, column_inside = rows < M, columns < N
    inner = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
    w_rows = w_ptr + columns.to(tl.int64)[:, None] * K
    x_scales = x_scale_ptr + rows.to(tl.int64) * s_row_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(0, blocks):
        k = block * BLOCK_K + inner
        x_mask, w_mask = row_inside[:, None], column_inside[:, None]
        if K % BLOCK_K != 0:
            x_mask, w_mask = x_mask & (k < K)[None, :], w_mask & (k < K)[None, :]
        x = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_rows + k[None, :], mask=w_mask, other=0.0)
        x_scale = tl.load(x_scales, mask=row_inside, other=0.0)
        w_scale = tl.load(w_scale_ptr + column_block * blocks + block)
        product = tl.dot(x, w.T)
        total += product * (x_scale * w_scale)[:, None]
        x_scales += s_column_stride
    y = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = row_inside[:, None] & column_inside[None, :]
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=mask)


def fp8_gemm_fwd(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the kernel; arguments and result as in `fp8_gemm_ref`.

    Args:
        x, weight: contiguous; x_scale in any strides; weight_scale contiguous.
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    y = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    if not rows:
        return y
    # Before its strides are read: a copy of strided scales has others.
    x_scale = aligned(x_scale)
    _fp8_gemm_fwd_kernel[(triton.cdiv(rows, TILE_M) * triton.cdiv(columns, TILE_N),)](
        aligned(x),
        x_scale,
        aligned(weight),
        aligned(weight_scale),
        y,
        rows,
        x_scale.stride(0),
        x_scale.stride(1),
        N=columns,
        K=inner,
        BLOCK_M=TILE_M,
        BLOCK_N=TILE_N,
        BLOCK_K=BLOCK_K,
        GROUP=GROUP_ROWS,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        enable_fp_fusion=False,
    )
    return y
