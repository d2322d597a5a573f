"""Where the rows of a score matrix lie: as DeepGEMM lays them, so that one rule serves a compiler.

A compiled graph asserts the strides that it traced, whichever implementation runs.
"""

from __future__ import annotations

import torch

_TILE = 256
"""Keys of a tile; packed rows have room for one more."""

_PACKED_ALIGNMENT = 64


def row_stride(columns: int, paged: bool) -> int:
    """Return the scores from one row to the next, as vLLM 0.25.1's DeepGEMM allocates them.

    `indexer.deep_gemm` checks it at start-up.
    """
    if paged:
        return (columns + _TILE - 1) // _TILE * _TILE
    room = columns + _TILE
    return (room + _PACKED_ALIGNMENT - 1) // _PACKED_ALIGNMENT * _PACKED_ALIGNMENT


def new_scores(like: torch.Tensor, columns: int, paged: bool) -> torch.Tensor:
    """Return [rows of `like`, columns] fp32, unwritten, on the device of `like`."""
    rows = like.new_empty((like.shape[0], row_stride(columns, paged)), dtype=torch.float32)
    return rows[:, :columns]
