"""Injected faults: what a negative control runs to show that a relation can fail."""

from __future__ import annotations

import torch

from consistent_kernels.testing.bitwise import integer_view


def flip_lowest_bit(tensor: torch.Tensor, index: tuple[int, ...]) -> torch.Tensor:
    """Return a copy of `tensor` with the lowest bit of one element flipped (a one-ulp fault)."""
    bits = integer_view(tensor).clone()
    bits[index] ^= 1
    return bits.view(tensor.dtype)


def round_early(tensor: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Round to `dtype` and return to fp32: a rounding point one step too early."""
    return tensor.to(dtype).to(torch.float32)


def split_k_linear(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
    """A linear whose K sum is cut into `splits` partial sums (what stock GEMMs do at small M).

    Args:
        x: [T, K]; weight: [N, K]. Computed in fp32, rounded once to x.dtype.
    """
    parts = [
        a.float() @ b.float().t()
        for a, b in zip(x.chunk(splits, dim=1), weight.chunk(splits, dim=1), strict=True)
    ]
    return torch.stack(parts).sum(0).to(x.dtype)
