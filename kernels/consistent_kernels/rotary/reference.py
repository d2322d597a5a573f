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
    tokens, num_q_heads, head_dim = q.shape
    half = cos_table.shape[1]
    both = torch.cat((q, k), dim=1)
    halves = both[..., : 2 * half].float().view(tokens, -1, 2, half)
    cos = cos_table.index_select(0, positions).view(tokens, 1, 1, half)
    sin = sin_table.index_select(0, positions).view(tokens, 1, 1, half)
    rotated, crossed = halves * cos, halves * sin
    rotated.select(2, 0).sub_(crossed.select(2, 1))
    rotated.select(2, 1).add_(crossed.select(2, 0))
    rotated = rotated.view(tokens, -1, 2 * half)
    if 2 * half < head_dim:
        rotated = torch.cat((rotated, both[..., 2 * half :].float()), dim=2)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    return q_out.copy_(rotated[:, :num_q_heads]), k_out.copy_(rotated[:, num_q_heads:])
