"""Index scores in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch

from consistent_kernels.indexer.layout import new_scores
from consistent_kernels.tree import halving_sum


def row_scores_ref(
    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor
) -> torch.Tensor:
    """Scores of one query against n keys.

    e4m3 values are integers times 2^-9 below 2^18, so a product of 128 fits into fp64 without
    rounding: the order in which a library adds them moves no bit.

    Args:
        q: [H, 128] e4m3; weights: [H] fp32; k: [n, 128] e4m3; k_scale: [n] fp32.

    Returns:
        [n] fp32.
    """
    dots = (k.float().double() @ q.float().double().t()).float()
    relu = torch.where(dots > 0, dots, torch.zeros_like(dots))
    return halving_sum(relu * weights) * k_scale


def indexer_scores_ref(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Scores of every query against its own columns of packed keys.

    Args:
        q: [T, H, 128] e4m3; weights: [T, H] fp32; k: [N, 128] e4m3; k_scale: [N] fp32.
        starts, ends: [T] first key and the one after the last.

    Returns:
        [T, N] fp32, -inf outside [start, end).
    """
    scores = new_scores(q, len(k), paged=False).fill_(float("-inf"))
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if end > start:
            scores[row, start:end] = row_scores_ref(
                q[row], weights[row], k[start:end], k_scale[start:end]
            )
    return scores
