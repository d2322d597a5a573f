"""Key tiles out of bf16 pages as one compiled loop: moves and widens, computes nothing.

See `consistent_kernels.rms_norm.loops` for why a loop, and `rotary/loops.py` for why slices.
"""

from __future__ import annotations

import ctypes

import numba
import numpy as np
import torch


# In every file of loops: Numba's cache on disk does not notice a change in another file.
@numba.njit(inline="always")
def _wide(bits: np.uint16) -> np.float32:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.cfunc(
    numba.int64(
        numba.types.CPointer(numba.types.uint16),
        numba.types.CPointer(numba.types.int64),
        numba.types.CPointer(numba.types.float32),
        *(numba.int64,) * 6,
    ),
    cache=True,
)
def _gather(rows_at, index_at, tiles_at, limit, stride, tiles, keys, heads, width):
    rows = numba.carray(rows_at, (limit * stride,))
    index = numba.carray(index_at, (tiles * keys,))
    out = numba.carray(tiles_at, (tiles * heads * keys, width))
    for tile in range(tiles):
        for key in range(keys):
            row = index[tile * keys + key]
            if row < 0 or row >= limit:
                return 1
            for head in range(heads):
                begin = row * stride + head * width
                source = rows[begin : begin + width]
                target = out[(tile * heads + head) * keys + key]
                for j in range(width):
                    target[j] = _wide(source[j])
    return 0


_call = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_void_p,) * 3, *(ctypes.c_int64,) * 6)(
    _gather.address
)


def gather_tiles(rows: torch.Tensor, index: torch.Tensor, tiles: torch.Tensor) -> bool:
    """tiles[p, h, j] = rows[index[p * keys + j], h], widened to fp32.

    Args:
        rows: [n, heads, width] bf16; heads of a row lie side by side.
        index: [pairs * keys] int64, contiguous.
        tiles: [pairs, heads, keys, width] fp32, contiguous; written.

    Returns:
        False where the layout is another one or an index has no row; nothing is promised of
        `tiles` then.
    """
    if rows.device.type != "cpu" or rows.dtype != torch.bfloat16:
        return False
    if rows.stride()[1:] != (rows.shape[2], 1):
        return False
    pairs, heads, keys, width = tiles.shape
    bad = _call(
        rows.data_ptr(),
        index.data_ptr(),
        tiles.data_ptr(),
        rows.shape[0],
        rows.stride(0),
        pairs,
        keys,
        heads,
        width,
    )
    return not bad
