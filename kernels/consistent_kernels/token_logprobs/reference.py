"""Token log-probs in plain PyTorch: the readable form of the spec, and the CPU program.

Every addition that crosses elements is written down (a halving tree inside a tile, then tiles in
ascending order); max, exp and log are elementwise or order-free. So a row's bits depend on that row
alone. ATen's exp and log give the same bits in the vector body and in the tail of a loop (tested
here on AVX2 and AVX-512; its exp2 does not).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from consistent_kernels.token_logprobs.spec import REFERENCE_ROWS, SMALLEST_DELTA, VOCAB_TILE

_INF = float("inf")


def _halving_sum(values: torch.Tensor) -> torch.Tensor:
    size = values.shape[-1]
    while size > 1:
        size //= 2
        values = values[..., :size] + values[..., size:]
    return values[..., 0]


def _finite_base(maximum: torch.Tensor) -> torch.Tensor:
    # A tile of masked ids has maximum -inf; -inf - -inf would be NaN.
    return torch.where(maximum == -_INF, 0.0, maximum)


def divisor(temperature: torch.Tensor) -> torch.Tensor:
    """Return what logits are divided by, [T] fp32: greedy's 0 becomes 1."""
    return torch.where(temperature == 0, 1.0, temperature)


def scaled_logits(
    logits: torch.Tensor, temperature: torch.Tensor, valid_vocab: int, banned: torch.Tensor | None
) -> torch.Tensor:
    """z = logit / temperature without the ids beyond `valid_vocab`; banned ids are -inf.

    Args:
        logits: [T, V] fp32.
        temperature: [T] fp32.
        valid_vocab: ids that exist.
        banned: bool [V] or None.

    Returns:
        [T, valid_vocab] fp32; a view of `logits` where nothing has to change.
    """
    z = logits[:, :valid_vocab]
    by = divisor(temperature)
    if not bool((by == 1).all()):  # dividing by 1 is exact
        z = z / by[:, None]
    if banned is not None:
        z = z.masked_fill(banned[:valid_vocab], -_INF)
    return z


def _tile_partials(
    z: torch.Tensor, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Per tile: m = max, s = sum exp(z - m) and w = sum exp(z - m) (z - m); each [T, tiles]."""
    rows, width = z.shape
    tiles = -(-width // VOCAB_TILE)
    if tiles * VOCAB_TILE != width:
        z = torch.nn.functional.pad(z, (0, tiles * VOCAB_TILE - width), value=-_INF)
    z = z.reshape(rows, tiles, VOCAB_TILE)
    m = z.amax(-1)
    delta = z - _finite_base(m)[..., None]
    if not entropy:
        return m, _halving_sum(delta.exp_()), None
    delta.clamp_(min=SMALLEST_DELTA)
    weight = delta.exp()
    return m, _halving_sum(weight), _halving_sum(delta.mul_(weight))


def _ascending_sum(terms: torch.Tensor) -> torch.Tensor:
    first, *rest = terms.t().contiguous().unbind(0)
    total = first.clone()
    for term in rest:
        total += term
    return total


def merge_tiles(
    m: torch.Tensor,
    s: torch.Tensor,
    w: torch.Tensor | None,
    ascending_sum: Callable[[torch.Tensor], torch.Tensor] = _ascending_sum,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Merge tiles in ascending order: ([T] logsumexp, [T] entropy or None)."""
    maximum = m.amax(-1)
    delta = (m - _finite_base(maximum)[:, None]).clamp_(min=SMALLEST_DELTA)
    scale = delta.exp()
    total = ascending_sum(s * scale)
    log_total = total.log()
    if w is None:
        return maximum + log_total, None
    mean = ascending_sum((w + delta * s) * scale) / total
    return maximum + log_total, log_total - mean


def chosen_logits(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
) -> torch.Tensor:
    """z at `ids` [T, k]."""
    z = logits.gather(1, ids) / divisor(temperature)[:, None]
    masked = ids >= valid_vocab
    if banned is not None:
        masked = masked | banned[ids]
    return z.masked_fill(masked, -_INF)


def token_logprobs_from_logits_ref(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """logprob = z[id] - logsumexp(z); logsumexp over tiles of 1024 ids, merged in ascending order.

    Args:
        logits: [T, V] fp32.
        ids: [T, k] int64.
        temperature: [T] fp32; 0 means 1.
        valid_vocab: ids from here on are -inf.
        banned: bool [V] or None.
        entropy: whether to compute it; no other bit depends on this.

    Returns:
        (logprob [T, k], logsumexp [T], entropy [T] or None), fp32.
    """
    parts = []
    for start in range(0, max(logits.shape[0], 1), REFERENCE_ROWS):
        rows = slice(start, start + REFERENCE_ROWS)
        z = scaled_logits(logits[rows], temperature[rows], valid_vocab, banned)
        lse, mean_surprise = merge_tiles(*_tile_partials(z, entropy))
        chosen = chosen_logits(logits[rows], ids[rows], temperature[rows], valid_vocab, banned)
        parts.append((chosen - lse[:, None], lse, mean_surprise))
    logprobs, lses, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(lses), torch.cat(entropies) if entropy else None


def grad_logits_ref(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    saved: tuple[torch.Tensor, torch.Tensor | None],
    grads: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """Gradient with respect to the logits, fp32.

    With p = exp(z - L) and H the entropy:
    dz = sum_k g_k (onehot_k - p) + g_L p - g_H p (log p + H); dlogit = dz / temperature; masked ids
    are constants and receive 0.

    Args:
        logits, ids, temperature, valid_vocab, banned: as in the forward.
        saved: (logsumexp [T], entropy [T] or None) of the forward.
        grads: (grad_logprob [T, k], grad_logsumexp [T], grad_entropy [T]), each or None.

    Returns:
        [T, V] fp32.
    """
    lse, entropy = saved
    grad_logprob, grad_lse, grad_entropy = grads
    z = scaled_logits(logits, temperature, valid_vocab, banned)
    log_p = (z - lse[:, None]).clamp_(min=SMALLEST_DELTA)
    p = log_p.exp()
    weight = torch.zeros_like(lse) if grad_lse is None else grad_lse
    if grad_logprob is not None:
        masked = ids >= valid_vocab
        if banned is not None:
            masked = masked | banned[ids]
        grad_logprob = grad_logprob.masked_fill(masked, 0.0)
        weight = weight - grad_logprob.sum(-1)
    coefficient = weight[:, None]
    if grad_entropy is not None:
        coefficient = coefficient - grad_entropy[:, None] * (log_p + entropy[:, None])
    grad = torch.zeros_like(logits)
    torch.mul(p, coefficient, out=grad[:, :valid_vocab])
    if grad_logprob is not None:
        grad.scatter_add_(1, ids, grad_logprob)
    return grad.div_(divisor(temperature)[:, None])
