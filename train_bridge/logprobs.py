"""Log-probs of a batch's tokens, with the bits that the engine returned when it sampled them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from consistent_kernels.errors import ConsistencyError, invalid
from train_bridge.causal_lm import is_sharded
from train_bridge.hf import bridge_state
from train_bridge.modules import Scoring, unwrapped
from train_bridge.packing import PackedBatch, is_marked
from train_bridge.weights import require_finite


class TokenScores(NamedTuple):
    """Scores in the layout of the input: entry [b, t] is about the token `input_ids[b, t]`.

    Attributes:
        log_probs: [B, L] fp32, log-prob of that token given those before it in its sequence; 0
            where `mask` is False.
        entropy: [B, L] fp32 of the distribution that it was drawn from, or None.
        mask: [B, L] bool, the tokens that were scored.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    mask: torch.Tensor


def token_logprobs(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    *,
    temperature: float | torch.Tensor = 1.0,
    response_mask: torch.Tensor | None = None,
    valid_vocab: int | None = None,
    banned: torch.Tensor | None = None,
    entropy: bool = True,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
) -> TokenScores:
    """Score the tokens of a padded or packed batch; [tokens, vocabulary] never exists.

    The bits of a token do not depend on padding, packing, micro-batches, autocast, training mode or
    on whether gradients are recorded. With gradients on, the result carries them.

    Args:
        model: bridged (possibly inside DDP or FSDP2).
        input_ids: [B, L]; padded with `attention_mask`, or packed ([1, T]) with `position_ids`
            that restart at 0.
        attention_mask: [B, L], bool or 0/1, 1 on real tokens; padding on either side.
        position_ids: [B, L]; counts from 0 in each sequence.
        temperature: as sampled with: one number, or a float32 tensor [B], [B, 1] or [B, L] (where a
            token stands). 0 (greedy) means 1; vLLM samples at 0.01 what lies between.
        response_mask: [B, L], bool or 0/1, 1 on the tokens to score; all but the first of each
            sequence by default. Other tokens cost no head.
        valid_vocab: ids from here on are impossible (padded vocabulary rows).
        banned: impossible ids, [n] integers or a bool mask [V].
        entropy: whether to compute it.
        micro_batch_size: sequences of one forward, all by default.
        micro_batch_tokens: tokens of one forward, unlimited by default; a longer sequence goes
            alone.

    Raises:
        InvalidInputError: shapes, ids or positions; a response mask on a first token or on padding;
            a parameter that is not finite, by name.
        ConfigurationError: the model is not bridged.
    """
    bridge_state(model)
    for name, limit in (
        ("micro_batch_size", micro_batch_size),
        ("micro_batch_tokens", micro_batch_tokens),
    ):
        if limit is not None and limit < 1:
            raise invalid("token_logprobs", name, "at least 1", limit)
    inner = unwrapped(model)
    sharded = is_sharded(inner)
    batch = inner.pack(input_ids, attention_mask, position_ids)
    tokens = _scored_tokens(batch, response_mask)
    heat = batch.per_token(temperature, tokens)
    bounds = list(batch.micro_batches(micro_batch_size, micro_batch_tokens))
    edges = torch.tensor([batch.offsets[stop] for _, stop in bounds], device=tokens.device)
    cuts = [0, *torch.searchsorted(tokens, edges).tolist()]
    log_probs, entropies = [], []
    for (start, stop), first, last in zip(bounds, cuts[:-1], cuts[1:], strict=True):
        if first == last and not sharded:  # FSDP2's ranks must all make the same calls
            continue
        mine = tokens[first:last]
        scoring = Scoring(
            rows=mine - batch.offsets[start] - 1,
            ids=batch.ids[mine],
            temperature=heat[first:last] if isinstance(heat, torch.Tensor) else heat,
            valid_vocab=valid_vocab,
            banned=banned,
            entropy=entropy,
        )
        column, uncertainty = model(batch=batch.sequences(start, stop), scoring=scoring)
        log_probs.append(column)
        entropies.append(uncertainty)
    return _scattered(model, batch, tokens, log_probs, entropies if entropy else [])


def _scored_tokens(batch: PackedBatch, response_mask: torch.Tensor | None) -> torch.Tensor:
    """[N] int64, ascending: the packed tokens to score."""
    has_prefix = batch.positions > 0
    if response_mask is None:
        return has_prefix.nonzero().squeeze(1)
    if tuple(response_mask.shape) != batch.shape:
        raise invalid(
            "token_logprobs",
            "response_mask",
            f"of shape {batch.shape}",
            tuple(response_mask.shape),
            "It marks tokens of input_ids, prompt included",
        )
    asked = is_marked("response_mask", response_mask.to(batch.ids.device), "token_logprobs")
    chosen = batch.take(asked)
    if int(chosen.sum()) != int(asked.sum()):
        raise invalid("token_logprobs", "response_mask", "0 on padding", "1 on some")
    if bool((chosen & ~has_prefix).any()):
        raise invalid(
            "token_logprobs",
            "response_mask",
            "0 on the first token of a sequence",
            "1 on some",
            "Nothing precedes that token, so it has no log-prob",
        )
    return chosen.nonzero().squeeze(1)


def _scattered(
    model: nn.Module,
    batch: PackedBatch,
    tokens: torch.Tensor,
    log_probs: list[torch.Tensor],
    entropies: list[torch.Tensor],
) -> TokenScores:
    size = batch.shape[0] * batch.shape[1]
    where = batch.index[tokens]
    mask = torch.zeros(size, dtype=torch.bool, device=tokens.device)
    mask[where] = True

    def spread(columns: list[torch.Tensor]) -> torch.Tensor:
        full = torch.zeros(size, dtype=torch.float32, device=tokens.device)
        if columns:
            full = full.index_copy(0, where, torch.cat(columns))
        return full.view(batch.shape)

    scores = spread(log_probs)
    if bool(torch.isnan(scores).any()):
        require_finite(model, "token_logprobs")
        row, column = torch.isnan(scores).nonzero()[0].tolist()
        raise ConsistencyError(
            f"token_logprobs: NaN at row {row}, column {column} though every parameter is finite: "
            "activations overflowed, or valid_vocab and banned leave no token. Compare with an "
            "earlier checkpoint"
        )
    return TokenScores(scores, spread(entropies) if entropies else None, mask.view(batch.shape))
