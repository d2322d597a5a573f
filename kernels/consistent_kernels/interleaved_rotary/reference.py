"""Interleaved rotary in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch


def interleaved_rotary_ref(
    positions: torch.Tensor,
    x: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
    inverse: bool,
) -> torch.Tensor:
    """Rotate adjacent pairs of the last columns of each head, in fp32, rounded once.

    Args:
        positions: [T]; x: [T, heads, D].
        cos_table, sin_table: [max_position, rotary_dim / 2] fp32.
        inverse: rotate by the opposite angle.

    Returns:
        [T, heads, D], dtype of x, contiguous.
    """
    out = x.clone(memory_format=torch.contiguous_format)
    interleaved_rotary_in_place_ref(positions, out, cos_table, sin_table, inverse)
    return out


def interleaved_rotary_in_place_ref(
    positions: torch.Tensor,
    x: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
    inverse: bool,
) -> None:
    """`interleaved_rotary_ref`, written over the last columns of x."""
    half = cos_table.shape[1]
    first = x.shape[2] - 2 * half
    pairs = x[..., first:].float().unflatten(-1, (half, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    cos = cos_table.index_select(0, positions).unsqueeze(1)
    sin = sin_table.index_select(0, positions).unsqueeze(1)
    sin = -sin if inverse else sin
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    x[..., first:] = turned.flatten(-2).to(x.dtype)
