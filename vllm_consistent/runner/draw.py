"""The random draw: one uniform number a row, inverse cumulative distribution.

vLLM draws an exponential variate for every token of the vocabulary, which on a CPU costs as much as
several layers. The draw is not part of the contract: any sampler of the same distribution will do.
A row's draw depends on that row and its number alone, so a seed gives the same tokens in any batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from consistent_kernels import llvm

_TILE = 1024


def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    partials: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token a row from softmax(logits / temperature).

    Args:
        logits: [T, V] fp32; -inf is never drawn. Not modified.
        temperature: [T]; rows at 0 are drawn at 1 and are the caller's to ignore.
        uniform: [T] fp64 in [0, 1).
        partials: of `shared_partials` where the same logits and temperatures are scored too.

    Returns:
        [T] int64, in [0, V) also for a row of NaN: its log-prob is NaN, and the next step's
        embedding must exist.
    """
    vocab = logits.shape[1]
    if logits.is_cuda:
        from consistent_kernels.token_logprobs import draw_triton

        by = temperature.float()
        if partials is None:
            partials = shared_partials(logits, by)
        return draw_triton.draw(logits, by, partials, uniform)
    safe = torch.where(temperature > 0, temperature, 1.0)
    if llvm.is_available():
        from consistent_kernels.token_logprobs import draw_llvm

        by = safe.float()
        if partials is None:
            partials = shared_partials(logits, by)
        return draw_llvm.draw(logits, by, partials, uniform)
    mass, inside_of = _masses(logits, safe)
    mass = mass.double().cumsum(-1)
    target = uniform.unsqueeze(1) * mass[:, -1:]
    # right=True: a tile or token of no mass is never the first one above the target.
    tile = torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1)
    before = torch.where(tile > 0, mass.gather(1, (tile - 1).clamp(min=0)), 0.0)
    inside = inside_of(tile).double().cumsum(-1)
    token = torch.searchsorted(inside, target - before, right=True)
    # Rounding may put the target at the very end of the tile: take its last token with mass.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous()).clamp_(max=_TILE - 1)
    drawn = (tile * _TILE + torch.minimum(token, last)).squeeze(1)
    # A row without any mass (NaN, or every token masked) ends in the padding of the last tile.
    return drawn.clamp_(max=vocab - 1)


def _masses(
    logits: torch.Tensor, by: torch.Tensor
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return unnormalized probabilities: [T, tiles] of whole tiles, and those inside a tile.

    Args:
        logits: [T, V]; by: [T], above 0.

    Returns:
        (mass fp32, a function of tile [T, 1] that gives [T, 1024] fp32, 0 beyond the vocabulary).
    """
    rows, vocab = logits.shape
    safe = by.unsqueeze(1)
    weights = (logits / safe).sub_(logits.amax(-1, keepdim=True) / safe).exp_()
    short = -vocab % _TILE
    if short:
        weights = torch.nn.functional.pad(weights, (0, short))
    tiles = weights.view(rows, -1, _TILE)
    row = torch.arange(rows, device=logits.device)
    return tiles.sum(-1, dtype=torch.float32), lambda tile: tiles[row, tile.squeeze(1)]


def shared_partials(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """The log-prob's sums per tile, for the draw and for the score: the vocabulary is read once.

    Args:
        logits: [T, V] fp32 on CUDA, or on a CPU where "llvm" is available; temperature: [T], 0
            counts as 1.
    """
    if logits.is_cuda:
        from consistent_kernels.token_logprobs import triton

        return triton.tile_partials(logits, temperature.float().contiguous(), logits.shape[1])
    from consistent_kernels.token_logprobs.llvm import tile_partials
    from consistent_kernels.token_logprobs.reference import divisor

    return tile_partials(logits, divisor(temperature.float()), logits.shape[1])
