"""Grouped linear in Triton: K in ascending tiles, one fp32 accumulator an element."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned
from consistent_kernels.grouped_linear import triton_tma
from consistent_kernels.grouped_linear.spec import BASE_TILE, TmaTile, tiles_of
from consistent_kernels.linear.probe import probe_inputs, same_bytes
from consistent_kernels.linear.schedule import TritonTile

_PROBED_ROWS, _PROBED_COLUMNS = 192, 256
"""Columns: whole tiles of any width, as a `TmaTile` wants them."""


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
        x_mask, w_mask = row_inside[:, None], column_inside[:, None]
        if K % BLOCK_K != 0:
            x_mask, w_mask = x_mask & (k < K), w_mask & (k < K)
        x = tl.load(x_rows + k, mask=x_mask, other=0.0)
        w = tl.load(w_rows + k, mask=w_mask, other=0.0)
        accumulator = tl.dot(x, w.T, accumulator, input_precision="ieee")
    y = y_ptr + (rows.to(tl.int64)[:, None] * G + group) * N + columns[None, :]
    mask = row_inside[:, None] & column_inside[None, :]
    tl.store(y, accumulator.to(y_ptr.dtype.element_ty), mask=mask)


@functools.cache
def tiles_with_equal_bits(
    columns: int, inner: int, dtype: torch.dtype, device: torch.device
) -> frozenset[TritonTile]:
    """Return the tiles of layers [G, N, K] that give the base tile's bytes; cached.

    Inputs whose products cancel: what is left is the error of the additions, so another order
    shows even after the rounding. Elements of four bytes run the base tile alone.

    Args:
        columns, inner: N and K, which name the tiles; the binary depends on K.
        dtype: of x and weight.
        device: a CUDA device.
    """
    equal = {BASE_TILE}
    if dtype.itemsize == 2:
        inputs = probe_inputs(_PROBED_ROWS, _PROBED_COLUMNS, inner, dtype)
        x, weight = (torch.stack((part, part.flip(0))).to(device) for part in inputs)
        x = x.transpose(0, 1).contiguous()
        expected = launch(x, weight, BASE_TILE)
        for _, tile in tiles_of(columns, inner, _has_tma(device)):
            if same_bytes(launch(x, weight, tile), expected):
                equal.add(tile)
    return frozenset(equal)


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def tile_for(x: torch.Tensor, weight: torch.Tensor) -> TritonTile:
    """Return the tile for x [M, G, K]: it follows M only among tiles of equal bits."""
    rows, (_, columns, inner) = x.shape[0], weight.shape
    tiles = tiles_of(columns, inner, _has_tma(x.device))
    tile = next(tile for limit, tile in tiles if rows <= limit or limit == 0)
    equal = tiles_with_equal_bits(columns, inner, x.dtype, x.device)
    return tile if tile in equal else BASE_TILE


def launch(x: torch.Tensor, weight: torch.Tensor, tile: TritonTile) -> torch.Tensor:
    """Return x W^T [M, G, N] by the given tile; see `grouped_linear_fwd`."""
    if isinstance(tile, TmaTile):
        return triton_tma.launch(x, weight, tile)
    rows, groups, inner = x.shape
    columns = weight.shape[1]
    strided = x.stride(2) == 1 and x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0
    if not strided or x.data_ptr() % 16:
        padded = x.new_empty((rows, groups, -(-inner // 16) * 16))[..., :inner]
        x = padded.copy_(x)
    y = torch.empty((rows, groups, columns), dtype=x.dtype, device=x.device)
    if rows:
        grid = (triton.cdiv(rows, tile.block_m), triton.cdiv(columns, tile.block_n), groups)
        _grouped_linear_fwd_kernel[grid](
            x, aligned(weight), y, rows, x.stride(0), x.stride(1), G=groups, N=columns, K=inner,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return y


def grouped_linear_fwd(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Launch the kernel: x [M, G, K], weight [G, N, K] contiguous; returns [M, G, N]."""
    return launch(x, weight, tile_for(x, weight))
