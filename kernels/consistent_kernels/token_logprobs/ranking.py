"""The k likeliest tokens and a token's rank: what an engine's `logprobs=k` reports."""

from __future__ import annotations

from typing import NamedTuple

import torch

from consistent_kernels import llvm
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

_INF = float("inf")
_ROWS = 64
"""Rows handled at once: integer keys take 8 bytes a token."""


class TopLogprobs(NamedTuple):
    """The likeliest tokens, likeliest first.

    Attributes:
        logprob: [T, k] fp32.
        ids: [T, k] int64; of equal z the lower id comes first.
    """

    logprob: torch.Tensor
    ids: torch.Tensor


def _scaled(
    logits: torch.Tensor, temperature: torch.Tensor, valid: int, banned: torch.Tensor | None
) -> torch.Tensor:
    """z of a few rows, a fresh tensor; masked ids are -inf."""
    z = logits / divisor(temperature)[:, None]
    z[:, valid:] = -_INF
    return z if banned is None else z.masked_fill_(banned, -_INF)


def _top_ids(z: torch.Tensor, k: int) -> torch.Tensor:
    # One integer a token: ordered fp32 bits above, the id below, so no two tokens tie.
    vocab = z.shape[1]
    bits = z.add_(0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0: they are equal
    keys = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).long()
    keys <<= 32
    keys += torch.arange(vocab - 1, -1, -1, device=z.device)
    return (vocab - 1) - (torch.topk(keys, k, dim=-1).values & 0xFFFFFFFF)


def topk_ids(
    logits: torch.Tensor,
    k: int,
    *,
    temperature: float | torch.Tensor = 1.0,
    valid_vocab: int | None = None,
    banned: torch.Tensor | None = None,
) -> torch.Tensor:
    """The ids of the k largest z = logit / temperature, largest first; the lower id wins ties.

    Args:
        logits: [T, V] fp32.
        k: between 1 and V. Masked ids come last.
        temperature, valid_vocab, banned: as `token_logprobs_from_logits`. Temperature keeps the
            order but may round two logits to one z: then the lower id comes first.

    Returns:
        [T, k] int64. Only comparisons follow the division, so every device agrees.

    Raises:
        InvalidInputError: k, shapes or dtypes.
    """
    op = "topk_ids"
    check_logits(op, logits)
    rows, vocab = logits.shape
    if not 1 <= k <= vocab:
        raise invalid(op, "k", f"between 1 and {vocab}", k)
    by = temperature_rows(op, temperature, rows, logits.device)
    valid = valid_width(op, valid_vocab, vocab)
    mask = banned_mask(op, banned, vocab, logits.device)
    parts = [logits.new_empty((0, k), dtype=torch.int64)]
    for start in range(0, rows, _ROWS):
        part = slice(start, start + _ROWS)
        parts.append(_top_ids(_scaled(logits[part], by[part], valid, mask), k))
    return torch.cat(parts)


def topk_logprobs(
    logits: torch.Tensor,
    k: int,
    *,
    temperature: float | torch.Tensor,
    valid_vocab: int | None = None,
    banned: torch.Tensor | None = None,
    impl: str,
) -> TopLogprobs:
    """The k likeliest tokens of each row with their log-probs; the lower id wins ties.

    Args:
        logits, k: as `topk_ids`.
        temperature, valid_vocab, banned, impl: as `token_logprobs_from_logits`.

    Returns:
        TopLogprobs(logprob [T, k], ids [T, k]); log-probs have the bits of
        `token_logprobs_from_logits(logits, ids, ...)`, -inf for a masked id.

    Raises:
        InvalidInputError, UnsupportedError: as `topk_ids` and `token_logprobs_from_logits`.
    """
    options = {"temperature": temperature, "valid_vocab": valid_vocab, "banned": banned}
    ids = topk_ids(logits, k, **options)
    scored = token_logprobs_from_logits(logits, ids, entropy=False, impl=impl, **options)
    return TopLogprobs(scored.logprob, ids)


def token_ranks(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    valid_vocab: int | None = None,
    banned: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rank of each token: 1 + the number of ids with a strictly greater z = logit / temperature.

    Args:
        logits: [T, V] fp32.
        ids: [T] int.
        temperature, valid_vocab, banned: as `token_logprobs_from_logits`.

    Returns:
        [T] int64. Only comparisons follow the division, so every device agrees.
    """
    op = "token_ranks"
    check_logits(op, logits)
    rows, vocab = logits.shape
    if ids.dim() != 1:
        raise invalid(op, "ids", f"of shape ({rows},)", tuple(ids.shape))
    check_ids(op, ids, rows)
    by = temperature_rows(op, temperature, rows, logits.device)
    valid = valid_width(op, valid_vocab, vocab)
    mask = banned_mask(op, banned, vocab, logits.device)
    parts = [logits.new_empty(0, dtype=torch.int64)]
    for start in range(0, rows, _ROWS):
        part = slice(start, start + _ROWS)
        z = _scaled(logits[part], by[part], valid, mask)
        own = z.gather(1, ids[part].long()[:, None])
        parts.append((z > own).sum(-1) + 1)
    return torch.cat(parts)


def count_at_least(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """How many logits of a row are at least as large as that of its id: the rank vLLM reports.

    Args:
        logits: [T, V] fp32. A NaN counts for nobody.
        ids: [T] int64 in [0, V).

    Returns:
        [T] int64; integers, so every device agrees.

    Raises:
        InvalidInputError: shapes or dtypes.

    Source: vllm/v1/worker/gpu/sample/logprob.py, `_ranks_kernel` (0.25.1).
    """
    op = "count_at_least"
    check_logits(op, logits)
    check_ids(op, ids, logits.shape[0])
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise invalid(op, "ids", "int64 of 1 dimension", f"{ids.dtype} {ids.dim()}-D")
    if logits.is_cuda:
        # PyTorch writes the comparison, then widens it to int64: several passes over [T, V].
        from consistent_kernels.token_logprobs import ranking_triton

        rows = logits if logits.stride(1) == 1 else logits.contiguous()
        return ranking_triton.count_at_least(rows, ids.contiguous())
    if logits.device.type == "cpu" and llvm.is_available():
        from consistent_kernels.token_logprobs import ranking_llvm

        return ranking_llvm.count_at_least(
            logits if logits.stride(1) == 1 else logits.contiguous(), ids
        )
    return (logits >= logits.gather(-1, ids.unsqueeze(-1))).sum(-1)
