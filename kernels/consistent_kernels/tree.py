"""Sums in PyTorch whose order is written down: the order of a library sum may follow the shape."""

from __future__ import annotations

import torch


def halving_sum(values: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum over `dim`, first half plus second half until one is left; any length.

    The tree is that of a length padded with zeros to a power of two.

    Args:
        values: any shape with at least one element along `dim`.

    Returns:
        `values` without `dim`, dtype unchanged.
    """
    total = values.movedim(dim, -1)
    while (size := total.shape[-1]) > 1:
        half = 1 << ((size - 1).bit_length() - 1)
        left = total[..., :half]
        if half < size:
            rest = size - half
            added = left[..., :rest] + total[..., half:]
            left = torch.cat((added, left[..., rest:]), dim=-1) if rest < half else added
        total = left
    return total[..., 0]
