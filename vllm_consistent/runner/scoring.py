"""The one log-prob function of the engine: sampled tokens and re-scored prompt tokens pass here."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.token_logprobs import (
    count_at_least,
    token_logprobs_from_logits,
    topk_ids,
)

PROMPT_ROWS = 128
"""Prompt positions scored at once; a row's bits do not depend on it, memory does."""


def candidates(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, top: int
) -> torch.Tensor:
    """Return [T, 1 + top] ids: the chosen one, then the `top` likeliest; the lower id wins ties."""
    chosen = ids.unsqueeze(-1)
    if top == 0:
        return chosen
    return torch.cat((chosen, topk_ids(logits, top, temperature=temperature)), dim=1)


def score(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    top: int,
    impl: str,
    partials: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of `ids` [T] and of the `top` most likely tokens at `temperature`.

    Args:
        logits: [T, V] fp32, before any mask or scaling.
        ids: [T] int64.
        temperature: [T] fp32; 0 (greedy) scores at 1.
        top: how many candidates.
        impl: implementation of token_logprobs.
        partials: as `token_logprobs_from_logits`.

    Returns:
        (ids [T, 1 + top] int64, log-probs [T, 1 + top] fp32, rank [T]).
    """
    wanted = candidates(logits, ids, temperature, top)
    scored = token_logprobs_from_logits(
        logits, wanted, temperature=temperature, entropy=False, impl=impl, partials=partials
    )
    return wanted, scored.logprob, count_at_least(logits, ids)


def score_hidden(
    model: Any,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    top: int,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `score`, from hidden states [T, H], a fixed number of rows at a time."""
    pieces = []
    # One fp32 number a row, as the sampler has it: 0.7 as a Python float is another divisor.
    # Filled on the device: a copy from the host would wait for all that runs there.
    divisor = torch.full((), temperature, dtype=torch.float32, device=hidden.device)
    for start in range(0, len(ids), PROMPT_ROWS):
        stop = start + PROMPT_ROWS
        logits = model.compute_logits(hidden[start:stop])
        rows = divisor.expand(len(logits))
        pieces.append(score(logits, ids[start:stop], rows, top, impl))
    columns = zip(*pieces, strict=True)
    token_ids, logprobs, ranks = (torch.cat(column) for column in columns)
    return token_ids, logprobs, ranks
