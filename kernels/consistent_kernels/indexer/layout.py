"""Where the rows of a score matrix lie: as DeepGEMM lays them, so that one rule serves a compiler.

A compiled graph asserts the strides that it traced, whichever implementation runs.
"""

from __future__ import annotations

import torch

ROW_ALIGNMENT = 256
"""Scores between possible row starts (1,024 bytes): DeepGEMM, csrc/apis/attention.hpp."""


def row_stride(columns: int, paged: bool) -> int:
    """Return the scores from one row to the next: room for a tile beyond packed keys."""
    room = columns if paged else columns + ROW_ALIGNMENT
    return (room + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT


def new_scores(like: torch.Tensor, columns: int, paged: bool) -> torch.Tensor:
    """Return [rows of `like`, columns] fp32, unwritten, on the device of `like`."""
    rows = like.new_empty((like.shape[0], row_stride(columns, paged)), dtype=torch.float32)
    return rows[:, :columns]
