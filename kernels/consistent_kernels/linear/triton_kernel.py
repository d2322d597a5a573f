"""Linear in Triton: K in ascending tiles, one fp32 accumulator an element, whatever the tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.linear.schedule import GROUP_ROWS, TritonTile


# The launcher aligns every argument that Triton specializes on: it always specializes alike.
@triton.jit(do_not_specialize=["M"])
def _linear_fwd_kernel(
    x_ptr,  # [M, K], row stride x_stride, a multiple of 16
    w_ptr,  # [N, K] contiguous
    bias_ptr,  # [N] or unused
    y_ptr,  # [M, N] contiguous
    M,
    N,
    x_stride,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Tiles of GROUP row blocks run column by column, so that they share weights in the L2 cache.
    row_blocks = tl.cdiv(M, BLOCK_M)
    column_blocks = tl.cdiv(N, BLOCK_N)
    in_group = GROUP * column_blocks
    first = (tl.program_id(0) // in_group) * GROUP
    group = min(row_blocks - first, GROUP)
    inside_group = tl.program_id(0) % in_group
    rows = (first + inside_group % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (inside_group // group) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, column_inside = rows < M, columns < N
    inner = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    w_rows = w_ptr + columns.to(tl.int64)[:, None] * K
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + inner
        x_mask, w_mask = row_inside[:, None], column_inside[:, None]
        if K % BLOCK_K != 0:
            x_mask, w_mask = x_mask & (k < K)[None, :], w_mask & (k < K)[None, :]
        x = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_rows + k[None, :], mask=w_mask, other=0.0)
        accumulator = tl.dot(x, w.T, accumulator, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=column_inside, other=0.0)
        accumulator += bias.to(tl.float32)[None, :]
    y = y_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = row_inside[:, None] & column_inside[None, :]
    tl.store(y, accumulator.to(y_ptr.dtype.element_ty), mask=mask)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: TritonTile,
) -> None:
    """Write round(x W^T + b) to y [M, N] with the given tile; see `linear_fwd`."""
    rows, inner = x.shape
    columns = weight.shape[0]
    if not rows:
        return
    weight, x = aligned(weight), aligned_rows(x)
    blocks = triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n)
    _linear_fwd_kernel[(blocks,)](
        x,
        weight,
        aligned(bias.contiguous()) if bias is not None else weight,
        y,
        rows,
        columns,
        x.stride(0),
        K=inner,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP=GROUP_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
