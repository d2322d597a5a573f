"""The k likeliest tokens and a token's rank: what an engine's `logprobs=k` reports."""

from __future__ import annotations

from typing import NamedTuple

import torch

from consistent_kernels.errors import invalid
from consistent_kernels.token_logprobs.api import token_logprobs_from_logits
from consistent_kernels.token_logprobs.arguments import (
    banned_mask,
    check_ids,
    check_logits,
    temperature_rows,
    valid_width,
)
from consistent_kernels.token_logprobs.reference import divisor
from consistent_kernels.token_logprobs.spec import REFERENCE_ROWS


class TopLogprobs(NamedTuple):
    """The likeliest tokens, likeliest first.

    Attributes:
        logprob: [T, k] fp32.
        ids: [T, k] int64; of equal z the lower id comes first.
    """

    logprob: torch.Tensor
    ids: torch.Tensor


def _scaled(
    op: str,
    logits: torch.Tensor,
    temperature: float | torch.Tensor,
    valid_vocab: int | None,
    banned: torch.Tensor | None,
) -> torch.Tensor:
    by = divisor(temperature_rows(op, temperature, logits.shape[0], logits.device))
    z = logits / by[:, None]
    z[:, valid_width(op, valid_vocab, logits.shape[1]) :] = -float("inf")
    mask = banned_mask(op, banned, logits.shape[1], logits.device)
    return z if mask is None else z.masked_fill_(mask, -float("inf"))


def _top_ids(z: torch.Tensor, k: int) -> torch.Tensor:
    # One integer a token: ordered fp32 bits above, the id below, so no two tokens tie.
    vocab = z.shape[1]
    bits = (z + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0: they are equal
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    descending_ids = torch.arange(vocab - 1, -1, -1, device=z.device)
    keys = torch.topk((ordered << 32) + descending_ids, k, dim=-1).values
    return (vocab - 1) - (keys & 0xFFFFFFFF)


def topk_logprobs(
    logits: torch.Tensor,
    k: int,
    *,
    temperature: float | torch.Tensor,
    valid_vocab: int | None = None,
    banned: torch.Tensor | None = None,
    impl: str,
) -> TopLogprobs:
    """The k largest z = logit / temperature with their log-probs; the lower id wins ties.

    Args:
        logits: [T, V] fp32.
        k: between 1 and V. Masked ids come last, with log-prob -inf.
        temperature, valid_vocab, banned, impl: as `token_logprobs_from_logits`.

    Returns:
        TopLogprobs(logprob [T, k], ids [T, k]); log-probs have the bits of
        `token_logprobs_from_logits(logits, ids, ...)`.

    Raises:
        InvalidInputError, UnsupportedError: as `token_logprobs_from_logits`.
    """
    op = "topk_logprobs"
    check_logits(op, logits)
    rows, vocab = logits.shape
    if not 1 <= k <= vocab:
        raise invalid(op, "k", f"between 1 and {vocab}", k)
    by = temperature_rows(op, temperature, rows, logits.device)
    parts = [logits.new_empty((0, k), dtype=torch.int64)]
    for start in range(0, rows, REFERENCE_ROWS):
        part = slice(start, start + REFERENCE_ROWS)
        parts.append(_top_ids(_scaled(op, logits[part], by[part], valid_vocab, banned), k))
    ids = torch.cat(parts)
    scored = token_logprobs_from_logits(
        logits,
        ids,
        temperature=by,
        valid_vocab=valid_vocab,
        banned=banned,
        entropy=False,
        impl=impl,
    )
    return TopLogprobs(scored.logprob, ids)


def token_ranks(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    valid_vocab: int | None = None,
    banned: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rank of each token: 1 + the number of ids with a strictly greater z = logit / temperature.

    Args:
        logits: [T, V] fp32.
        ids: [T] int.
        temperature, valid_vocab, banned: as `token_logprobs_from_logits`.

    Returns:
        [T] int64. Only comparisons are made, so every device agrees.
    """
    op = "token_ranks"
    check_logits(op, logits)
    check_ids(op, ids, logits.shape[0])
    by = temperature_rows(op, temperature, logits.shape[0], logits.device)
    parts = [logits.new_empty(0, dtype=torch.int64)]
    for start in range(0, logits.shape[0], REFERENCE_ROWS):
        part = slice(start, start + REFERENCE_ROWS)
        z = _scaled(op, logits[part], by[part], valid_vocab, banned)
        own = z.gather(1, ids[part].long()[:, None])
        parts.append((z > own).sum(-1) + 1)
    return torch.cat(parts)
