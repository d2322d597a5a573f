"""Rotary in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch


def rotary_ref(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the halves of the first rotary_dim columns of each head, in fp32, rounded once.

    Args:
        positions: [T] int32 or int64.
        q: [T, Hq, D]; k: [T, Hk, D], same dtype.
        cos_table, sin_table: [max_position, rotary_dim / 2] fp32.

    Returns:
        (q, k) rotated, same shapes and dtype, contiguous.
    """
    both = torch.cat((q, k), dim=1)
    cos = cos_table[positions].unsqueeze(1)
    sin = sin_table[positions].unsqueeze(1)
    half = cos_table.shape[1]
    x1, x2 = both[..., :half].float(), both[..., half : 2 * half].float()
    both[..., :half] = x1 * cos - x2 * sin
    both[..., half : 2 * half] = x2 * cos + x1 * sin
    return both[:, : q.shape[1]].contiguous(), both[:, q.shape[1] :].contiguous()
