"""NaN poison for memory that a kernel must not read into its result."""

from __future__ import annotations

import torch


def poisoned_rows(x: torch.Tensor, *, before: int, after: int) -> tuple[torch.Tensor, slice]:
    """Embed `x` among NaN rows in a larger tensor.

    Returns:
        (buffer, rows): buffer[rows] holds x; every other row is NaN.
    """
    buffer = torch.full(
        (before + x.shape[0] + after, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device
    )
    rows = slice(before, before + x.shape[0])
    buffer[rows] = x
    return buffer, rows
