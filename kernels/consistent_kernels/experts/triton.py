"""The experts in Triton: K in ascending tiles, one fp32 accumulator an element, as in `linear`.

A tile holds rows of one expert only, and a row's products do not meet those of another row: where
it stands in its tile, and how many rows its expert has, moves no bit.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.experts.spec import (
    BASE_TILE,
    COMBINE_BLOCK,
    NUM_WARPS,
    TILES_BY_ROWS,
    GroupedTile,
)
from consistent_kernels.experts.triton_activation import gated_activation
from consistent_kernels.experts.triton_layout import ExpertLayout, expert_layout

_ROW_ELEMENTS = 16


# The launcher aligns every argument that Triton specializes on: it always specializes alike.
@triton.jit(do_not_specialize=["limit", "slots"])
def _grouped_linear_fwd_kernel(
    x_ptr,  # rows of K, row stride x_stride, a multiple of 16
    w_ptr,  # [E, N, K], or [E, 2 N, K] when GATED
    y_ptr,  # rows of N, row stride y_stride
    order_ptr,  # [places] the flat row at each place
    tile_expert_ptr,
    tile_start_ptr,
    tile_end_ptr,
    N,
    x_stride,
    y_stride,
    limit,
    slots,
    K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    column_blocks = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // column_blocks
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    place = tl.load(tile_start_ptr + tile) + tl.arange(0, BLOCK_M)
    row_inside = place < tl.load(tile_end_ptr + tile)
    flat = tl.load(order_ptr + place, mask=row_inside, other=0)
    columns = (tl.program_id(0) % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_inside = columns < N
    inner = tl.arange(0, BLOCK_K)
    # The first GEMM reads tokens and writes places; the second reads places and writes (token,
    # slot) rows.
    source = flat // slots if GATED else place
    target = place if GATED else flat
    x_rows = x_ptr + source.to(tl.int64)[:, None] * x_stride
    w_rows = w_ptr + columns.to(tl.int64)[:, None] * K
    w_rows += expert.to(tl.int64) * K * (2 * N if GATED else N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GATED:
        up_rows = w_rows + N * K
        up_accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + inner
        x_mask, w_mask = row_inside[:, None], column_inside[:, None]
        if K % BLOCK_K != 0:
            x_mask, w_mask = x_mask & (k < K)[None, :], w_mask & (k < K)[None, :]
        x = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_rows + k[None, :], mask=w_mask, other=0.0)
        accumulator = tl.dot(x, w.T, accumulator, input_precision="ieee")
        if GATED:
            up = tl.load(up_rows + k[None, :], mask=w_mask, other=0.0)
            up_accumulator = tl.dot(x, up.T, up_accumulator, input_precision="ieee")
    if GATED:
        dtype = y_ptr.dtype.element_ty
        gate, up = accumulator.to(dtype).to(tl.float32), up_accumulator.to(dtype).to(tl.float32)
        accumulator = gated_activation(gate, up, limit, HAS_LIMIT)
    y = y_ptr + target.to(tl.int64)[:, None] * y_stride + columns[None, :]
    mask = row_inside[:, None] & column_inside[None, :]
    tl.store(y, accumulator.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _combine_fwd_kernel(
    y_ptr,  # [T, K, H] contiguous
    ids_ptr,  # [T, K] int32 contiguous
    weights_ptr,  # [T, K] fp32 contiguous
    shared_ptr,  # [T, H], row stride shared_stride, or unused
    out_ptr,  # [T, H] contiguous
    H,
    shared_stride,
    K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        routed = tl.load(ids_ptr + token * K + slot) >= 0
        weight = tl.load(weights_ptr + token * K + slot)
        y = tl.load(y_ptr + (token * K + slot) * H + column, mask=inside & routed, other=0.0)
        total += tl.where(routed, weight * y.to(tl.float32), 0.0)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * shared_stride + column, mask=inside, other=0.0)
        total += shared.to(tl.float32)
    tl.store(out_ptr + token * H + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    layout: ExpertLayout,
    tile: GroupedTile,
    *,
    slots: int,
    gated: bool,
    limit: float | None = None,
) -> None:
    """Write one grouped GEMM to y.

    Args:
        x: gated: [T, K], rows by token; else [places, K].
        weight: [E, N, K], or [E, 2 N, K] when gated.
        y: gated: [places, N], silu(gate) * up; else [T * slots, N], by (token, slot).
        layout: from `expert_layout` with this tile's block_m.
    """
    columns = weight.shape[1] // 2 if gated else weight.shape[1]
    block_n = tile.columns(gated)
    blocks = layout.tile_expert.numel() * triton.cdiv(columns, block_n)
    x = aligned_rows(x)
    _grouped_linear_fwd_kernel[(blocks,)](
        x,
        aligned(weight),
        y,
        layout.order,
        layout.tile_expert,
        layout.tile_start,
        layout.tile_end,
        columns,
        x.stride(0),
        y.stride(0),
        0.0 if limit is None else limit,
        slots,
        K=weight.shape[2],
        GATED=gated,
        HAS_LIMIT=limit is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        # silu(gate) * up must not meet another operation in an fma.
        enable_fp_fusion=False,
    )


def outputs_with_tile(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    layout: str,
    tile: GroupedTile,
) -> torch.Tensor:
    """As `expert_outputs_fwd`, with the given tile."""
    tokens, slots = ids.shape
    experts, columns, width = w2.shape
    y = torch.empty((tokens, slots, columns), dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    flat = aligned(ids.int().contiguous()).view(-1)
    capacity = tokens if layout == "masked" else None
    places = expert_layout(flat, experts, tile.block_m, capacity=capacity)
    stride = triton.cdiv(width, _ROW_ELEMENTS) * _ROW_ELEMENTS
    hidden = torch.empty((places.places, stride), dtype=x.dtype, device=x.device)[:, :width]
    launch(x, w13, hidden, places, tile, slots=slots, gated=True, limit=limit)
    launch(hidden, w2, y.view(-1, columns), places, tile, slots=slots, gated=False)
    return y


@functools.cache
def tiles_with_equal_bits(
    hidden: int, width: int, dtype: torch.dtype, device: torch.device
) -> frozenset[GroupedTile]:
    """Return the tiles that give the base tile's bits for these sizes; cached.

    Args:
        hidden, width: H and I; the binaries depend on them.
        dtype: the model dtype.
        device: a CUDA device.
    """
    from consistent_kernels.linear.probe import probe_inputs

    experts, tokens, slots = 2, 150, 2
    ids = torch.arange(tokens * slots, device=device, dtype=torch.int32).remainder(experts)
    x, gate_up = (t.to(device) for t in probe_inputs(tokens, experts * 2 * width, hidden, dtype))
    h, down = (t.to(device) for t in probe_inputs(tokens * slots, experts * hidden, width, dtype))
    gate_up, down = gate_up.view(experts, -1, hidden), down.view(experts, -1, width)

    def results(tile: GroupedTile) -> torch.Tensor:
        # fp32 results: a rounding would hide most of what another order of additions changes.
        places = expert_layout(ids, experts, tile.block_m)
        first = x.new_empty((ids.numel(), width), dtype=torch.float32)
        second = x.new_empty((ids.numel(), hidden), dtype=torch.float32)
        launch(x, gate_up, first, places, tile, slots=slots, gated=True)
        launch(h, down, second, places, tile, slots=slots, gated=False)
        return torch.cat([first, second], dim=1).view(torch.int32)

    base = results(BASE_TILE)
    tiles = (tile for _, tile in TILES_BY_ROWS)
    return frozenset({BASE_TILE, *(t for t in tiles if torch.equal(results(t), base))})


def tile_for(x: torch.Tensor, w2: torch.Tensor, rows: int) -> GroupedTile:
    """Return the tile for `rows` rows: it follows their mean only among tiles of equal bits."""
    experts, hidden, width = w2.shape
    allowed = tiles_with_equal_bits(hidden, width, x.dtype, x.device)
    mean = triton.cdiv(rows, experts)
    tile = next(tile for limit, tile in TILES_BY_ROWS if mean <= limit or limit == 0)
    return tile if tile in allowed else BASE_TILE


def expert_outputs_fwd(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    layout: str,
) -> torch.Tensor:
    """Launch the kernels; arguments and result as in `consistent_kernels.experts.expert_outputs`.

    Slots that go nowhere are not written.
    """
    return outputs_with_tile(x, w13, w2, ids, limit, layout, tile_for(x, w2, ids.numel()))


def combine_fwd(
    y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """Launch the kernel; arguments and result as in `consistent_kernels.experts.combine`."""
    tokens, slots, columns = y.shape
    out = torch.empty((tokens, columns), dtype=y.dtype, device=y.device)
    if not tokens:
        return out
    y = aligned(y.contiguous())
    if shared is not None:
        shared = aligned_rows(shared)
    _combine_fwd_kernel[(tokens, triton.cdiv(columns, COMBINE_BLOCK))](
        y,
        aligned(ids.int().contiguous()),
        aligned(weights.contiguous()),
        shared if shared is not None else y,
        out,
        columns,
        shared.stride(0) if shared is not None else 0,
        K=slots,
        HAS_SHARED=shared is not None,
        BLOCK=COMBINE_BLOCK,
        num_warps=NUM_WARPS,
        # The spec rounds each product: no fma.
        enable_fp_fusion=False,
    )
    return out
