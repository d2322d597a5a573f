"""FP8 experts in Triton: the tile of `fp8_linear`, each holding rows of one expert only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned
from consistent_kernels.experts.triton_activation import gated_activation
from consistent_kernels.experts.triton_layout import ExpertLayout, expert_layout
from consistent_kernels.fp8_experts.spec import (
    BLOCK_K,
    NUM_STAGES,
    NUM_WARPS,
    TILE_M,
    TILE_N,
)
from consistent_kernels.quantization import quantize_rows


@triton.jit(do_not_specialize=["s_row_stride", "s_column_stride", "slots", "limit"])
def _fp8_grouped_fwd_kernel(
    x_ptr,  # rows of K float8, contiguous
    x_scale_ptr,  # [rows, ceil(K / 128)]
    w_ptr,  # [E, N, K] float8, or [E, 2 N, K] when GATED
    w_scale_ptr,  # [E, ceil(N / 128), ceil(K / 128)], or twice the blocks
    y_ptr,  # rows of N
    order_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    tile_end_ptr,
    s_row_stride,
    s_column_stride,
    slots,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # A tile of 128 columns has one weight scale a block of K.
    tl.static_assert(BLOCK_N == BLOCK_K)
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0) // column_blocks
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    place = tl.load(tile_start_ptr + tile) + tl.arange(0, BLOCK_M)
    row_inside = place < tl.load(tile_end_ptr + tile)
    flat = tl.load(order_ptr + place, mask=row_inside, other=0)
    column_block = tl.program_id(0) % column_blocks
    columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_inside = columns < N
    inner = tl.arange(0, BLOCK_K)
    source = (flat // slots if GATED else place).to(tl.int64)
    target = place if GATED else flat
    sides: tl.constexpr = 2 if GATED else 1
    x_rows = x_ptr + source[:, None] * K
    x_scales = x_scale_ptr + source * s_row_stride
    w_rows = w_ptr + columns.to(tl.int64)[:, None] * K + expert.to(tl.int64) * (sides * N * K)
    w_scales = w_scale_ptr + expert * (sides * column_blocks * blocks) + column_block * blocks
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        up_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(0, blocks):
        k = block * BLOCK_K + inner
        x_mask, w_mask = row_inside[:, None], column_inside[:, None]
        if K % BLOCK_K != 0:
            x_mask, w_mask = x_mask & (k < K)[None, :], w_mask & (k < K)[None, :]
        x = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
        x_scale = tl.load(x_scales, mask=row_inside, other=0.0)
        w = tl.load(w_rows + k[None, :], mask=w_mask, other=0.0)
        total += tl.dot(x, w.T) * (x_scale * tl.load(w_scales + block))[:, None]
        if GATED:
            up = tl.load(w_rows + N * K + k[None, :], mask=w_mask, other=0.0)
            up_scale = x_scale * tl.load(w_scales + column_blocks * blocks + block)
            up_total += tl.dot(x, up.T) * up_scale[:, None]
        x_scales += s_column_stride
    if GATED:
        dtype = y_ptr.dtype.element_ty
        gate, up_value = total.to(dtype).to(tl.float32), up_total.to(dtype).to(tl.float32)
        total = gated_activation(gate, up_value, limit, HAS_LIMIT)
    y = y_ptr + target.to(tl.int64)[:, None] * N + columns[None, :]
    mask = row_inside[:, None] & column_inside[None, :]
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=mask)


def launch(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    y: torch.Tensor,
    layout: ExpertLayout,
    *,
    slots: int,
    gated: bool,
    limit: float | None = None,
) -> None:
    """Write one grouped GEMM to y.

    Args:
        x, x_scale: gated: rows by token; else by place.
        weight, weight_scale: [E, N, K] and its blocks, or [E, 2 N, K] when gated.
        y: gated: [places, N]; else [T * slots, N], by (token, slot).
        layout: from `expert_layout` with TILE_M.
    """
    columns = weight.shape[1] // 2 if gated else weight.shape[1]
    blocks = layout.tile_expert.numel() * triton.cdiv(columns, TILE_N)
    _fp8_grouped_fwd_kernel[(blocks,)](
        aligned(x),
        aligned(x_scale),
        aligned(weight),
        aligned(weight_scale),
        y,
        layout.order,
        layout.tile_expert,
        layout.tile_start,
        layout.tile_end,
        x_scale.stride(0),
        x_scale.stride(1),
        slots,
        0.0 if limit is None else limit,
        N=columns,
        K=weight.shape[2],
        GATED=gated,
        HAS_LIMIT=limit is not None,
        BLOCK_M=TILE_M,
        BLOCK_N=TILE_N,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        enable_fp_fusion=False,
    )


def fp8_expert_outputs_fwd(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    scale_format: str,
    layout: str = "contiguous",
) -> torch.Tensor:
    """Launch the kernels; as `consistent_kernels.fp8_experts.fp8_expert_outputs`.

    Slots that go nowhere are not written.
    """
    tokens, slots = ids.shape
    experts, columns, width = w2.shape
    y = torch.empty((tokens, slots, columns), dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    flat = aligned(ids.int().contiguous()).view(-1)
    capacity = tokens if layout == "masked" else None
    placed = expert_layout(flat, experts, TILE_M, capacity=capacity)
    values, scale = quantize_rows(x, scale_format=scale_format, impl="triton")
    # Places that no row takes are quantized too; zeros keep them finite.
    hidden = torch.zeros((placed.places, width), dtype=x.dtype, device=x.device)
    launch(values, scale, w13, w13_scale, hidden, placed, slots=slots, gated=True, limit=limit)
    values, scale = quantize_rows(hidden, scale_format=scale_format, impl="triton")
    launch(values, scale, w2, w2_scale, y.view(-1, columns), placed, slots=slots, gated=False)
    return y
