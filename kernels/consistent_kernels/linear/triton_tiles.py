"""Which tile serves how many rows: any that a start-up probe found to give the base tile's bits."""

from __future__ import annotations

import functools

import torch

from consistent_kernels.linear.probe import probe_inputs, same_bytes
from consistent_kernels.linear.schedule import BASE_TILE, TILES_BY_ROWS, TritonTile
from consistent_kernels.linear.triton_kernel import launch

_PROBED_ROWS, _PROBED_COLUMNS = 256, 512


@functools.cache
def tiles_with_equal_bits(
    inner: int, dtype: torch.dtype, device: torch.device
) -> frozenset[TritonTile]:
    """Return the tiles that give the base tile's fp32 results for this K; cached.

    A tile changes neither the ascending order of K nor which products an instruction adds, unless
    the compiler selects another instruction for it. That is what the probe would see.

    Args:
        inner: K; the binary depends on it.
        dtype: dtype of x and weight.
        device: a CUDA device.
    """
    inputs = probe_inputs(_PROBED_ROWS, _PROBED_COLUMNS, inner, dtype)
    x, weight = (tensor.to(device) for tensor in inputs)
    expected = x.new_empty((_PROBED_ROWS, _PROBED_COLUMNS), dtype=torch.float32)
    launch(x, weight, None, expected, BASE_TILE)
    equal = {BASE_TILE}
    for _, tile in TILES_BY_ROWS:
        actual = torch.empty_like(expected)
        launch(x, weight, None, actual, tile)
        if same_bytes(actual, expected):
            equal.add(tile)
    return frozenset(equal)


def tile_for(x: torch.Tensor, columns: int) -> TritonTile:
    """Return the tile for x [M, K]: it follows M only among tiles of equal bits."""
    allowed = tiles_with_equal_bits(x.shape[1], x.dtype, x.device)
    rows = x.shape[0]
    tile = next(tile for limit, tile in TILES_BY_ROWS if rows <= limit or limit == 0)
    return tile if tile in allowed else BASE_TILE
