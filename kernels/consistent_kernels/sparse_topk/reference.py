"""The sparse top-k in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch

_LOWEST = -(1 << 63)
_NAN_BITS = -(1 << 31) + 1


def ordered_bits(scores: torch.Tensor) -> torch.Tensor:
    """Map fp32 to int32 so that integers compare as the scores do.

    -0.0 and +0.0 map to 0; every NaN maps to -2^31 + 1, which is below -inf (-2^31 + 2^23). The
    spec's unsigned form is this value with the top bit flipped.
    """
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = torch.where(scores == 0, torch.zeros_like(bits), ordered)
    return torch.where(scores.isnan(), torch.full_like(bits, _NAN_BITS), ordered)


def sparse_topk_ref(
    scores: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, k: int
) -> torch.Tensor:
    """Positions of the k largest keys of every row, in descending position, -1 last.

    Args:
        scores: [R, N] fp32; columns outside [starts, ends) may hold anything.
        starts, ends: [R] first column and the one after the last of a row's request.
        k: how many.

    Returns:
        [R, k] int32, column - start.
    """
    rows, columns = scores.shape
    starts64, ends64 = starts.to(torch.int64)[:, None], ends.to(torch.int64)[:, None]
    column = torch.arange(columns, device=scores.device)
    position = column[None, :] - starts64
    inside = (column[None, :] >= starts64) & (column[None, :] < ends64)
    # A signed high half and an unsigned low half: one int64 that sorts as the spec's key.
    key = ordered_bits(scores).to(torch.int64) * (1 << 32) + position
    key = torch.where(inside, key, torch.full_like(key, _LOWEST))
    taken = min(k, columns)
    # Keys of a row are distinct, so every correct sort returns one answer.
    best, index = key.topk(taken, dim=1)
    found = torch.where(best != _LOWEST, position.gather(1, index), torch.full_like(index, -1))
    result = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    result[:, :taken] = found.sort(dim=1, descending=True).values.to(torch.int32)
    return result
