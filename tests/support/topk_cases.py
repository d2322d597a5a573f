"""Score rows that make a wrong top-k visible: ties, both zeros, infinities, NaN, poison outside."""

from __future__ import annotations

import torch


def hazard_scores(rows: int, columns: int, *, seed: int, device: str = "cpu") -> torch.Tensor:
    """Normal scores, a third of them replaced by ties, +-0.0, +-inf and NaNs of two payloads."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, columns, generator=generator)
    pick = torch.rand(rows, columns, generator=generator)
    scores[pick < 0.06] = 0.0
    scores[(pick >= 0.06) & (pick < 0.12)] = -0.0
    scores[(pick >= 0.12) & (pick < 0.30)] = 1.5
    scores[(pick >= 0.30) & (pick < 0.31)] = float("-inf")
    scores[(pick >= 0.31) & (pick < 0.32)] = float("inf")
    bits = scores.view(torch.int32)
    bits[(pick >= 0.32) & (pick < 0.33)] = 0x7FC00001
    bits[(pick >= 0.33) & (pick < 0.34)] = -0x3FFFFE
    return scores.to(device)


def borders(*pairs: tuple[int, int], device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """(starts, ends) as int32 tensors."""
    starts, ends = zip(*pairs, strict=True)
    return (
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(ends, dtype=torch.int32, device=device),
    )


def plain_topk(scores: torch.Tensor, start: int, end: int, k: int) -> list[int]:
    """The spec in Python: sort (score class, score, position), take k, order, pad."""
    keys = []
    for position, score in enumerate(scores[start:end].tolist()):
        is_number = score == score
        # Python's -0.0 == 0.0 and its tuples compare left to right: the spec's order.
        keys.append((is_number, score if is_number else 0.0, position))
    chosen = sorted((key[2] for key in sorted(keys)[-k:]), reverse=True) if keys else []
    return chosen + [-1] * (k - len(chosen))
