"""The router in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch

from consistent_kernels.router.parameters import RouterParameters
from consistent_kernels.router.spec import DENOMINATOR_FLOOR

_NEVER = -(1 << 62)


def halving_tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension, first half plus second half; zero-padded to a power of two."""
    size = values.shape[-1]
    padded = 1 << (size - 1).bit_length()
    total = torch.nn.functional.pad(values, (0, padded - size))
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def scores_ref(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Score every expert.

    Args:
        logits: [T, E] fp32.
        scoring: one of `parameters.SCORINGS`.

    Returns:
        [T, E] fp32.
    """
    if scoring == "softmax":
        exponent = torch.exp(logits - logits.amax(-1, keepdim=True))
        return exponent / halving_tree_sum(exponent)[:, None]
    if scoring == "sigmoid":
        return torch.neg(logits).exp_().add_(1.0).reciprocal_()
    softplus = logits.clamp(min=0.0) + torch.log1p(torch.exp(-logits.abs()))
    return softplus.sqrt_()


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """fp32 to int64 in the same order; -0.0 as +0.0, NaN as -inf."""
    plain = torch.where(values.isnan(), float("-inf"), values) + 0.0
    bits = plain.view(torch.int32).long()
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))


def _largest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest keys in descending order; the lower index wins ties."""
    width = keys.shape[-1]
    index = torch.arange(width, device=keys.device)
    unique = keys * width + (width - 1 - index)
    return torch.topk(unique, count, dim=-1, sorted=True).indices


def choose_ref(
    scores: torch.Tensor, bias: torch.Tensor | None, parameters: RouterParameters
) -> torch.Tensor:
    """Choose experts.

    Args:
        scores: [T, E] fp32; bias: [E] fp32 or None.

    Returns:
        [T, K] int64, by descending choice; equal choices by ascending id.
    """
    choice = scores if bias is None else scores + bias
    keys = _ordered(choice)
    groups = parameters.num_groups
    if groups > 1:
        grouped = choice.view(-1, groups, parameters.group_size)
        # A NaN hides behind -inf here as in the keys.
        grouped = torch.where(grouped.isnan(), float("-inf"), grouped)
        ranked = grouped.sort(-1, descending=True).values
        two = bias is not None and parameters.group_size > 1
        group_scores = ranked[..., 0] + ranked[..., 1] if two else ranked[..., 0]
        kept = _largest(_ordered(group_scores), parameters.top_groups)
        allowed = torch.zeros(group_scores.shape, dtype=torch.bool, device=scores.device)
        allowed.scatter_(1, kept, torch.ones_like(kept, dtype=torch.bool))
        keys = torch.where(
            allowed[..., None], keys.view_as(grouped), _NEVER // keys.shape[-1]
        ).view_as(keys)
    return _largest(keys, parameters.top_k)


def router_ref(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    forced: torch.Tensor | None,
    valid: torch.Tensor | None,
    parameters: RouterParameters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `consistent_kernels.router.api.router`."""
    scores = scores_ref(logits, parameters.scoring)
    if forced is None:
        ids = choose_ref(scores, bias, parameters)
    else:
        # Padding may name any expert.
        ids = forced.long() if valid is None else torch.where(valid[:, None], forced.long(), 0)
    weights = scores.gather(1, ids)
    if parameters.renormalize:
        total = weights[:, 0].clone()
        for slot in range(1, parameters.top_k):
            total += weights[:, slot]
        weights = weights / (total + DENOMINATOR_FLOOR)[:, None]
    weights = weights * parameters.scale
    ids = ids.int()
    if valid is not None:
        ids = torch.where(valid[:, None], ids, -1)
        weights = torch.where(valid[:, None], weights, 0.0)
    return ids.contiguous(), weights.contiguous()


def router_bwd_ref(
    grad_weights: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    parameters: RouterParameters,
) -> torch.Tensor:
    """Gradient of the weights; the choice of experts has none.

    With p the scores, S their sum over the slots and g the gradient of the weights times scale:
    dp_k = (g_k - sum_j g_j p_j / S) / S when renormalized, else g_k; then through the scoring:
    softmax p_e (dp_e - sum_j dp_j p_j), sigmoid dp p (1 - p), sqrtsoftplus dp sigmoid(l) / (2 p).

    Args:
        grad_weights: [T, K] fp32; logits: [T, E] fp32; ids: [T, K], -1 in rows routed nowhere.

    Returns:
        [T, E] fp32.
    """
    # An id that no expert has is refused on a CPU; on a GPU its weight was 0.
    routed = (ids >= 0) & (ids < logits.shape[1])
    # Padding may hold NaN, and zero times that is not zero.
    logits = torch.where(routed.any(-1, keepdim=True), logits.float(), 0.0)
    slots = torch.where(routed, ids, 0).long()
    scores = scores_ref(logits, parameters.scoring)
    chosen = scores.gather(1, slots)
    grad = torch.where(routed, grad_weights.float() * parameters.scale, 0.0)
    if parameters.renormalize:
        total = chosen.sum(-1, keepdim=True) + DENOMINATOR_FLOOR
        grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
    grad = torch.where(routed, grad, 0.0)
    if parameters.scoring == "softmax":
        grad_scores = torch.zeros_like(scores).scatter_add_(1, slots, grad)
        return scores * (grad_scores - (grad * chosen).sum(-1, keepdim=True))
    if parameters.scoring == "sigmoid":
        slope = chosen * (1.0 - chosen)
    else:
        slope = torch.sigmoid(logits.gather(1, slots)) / (2.0 * chosen)
        slope = torch.where(chosen > 0, slope, 0.0)
    return torch.zeros_like(scores).scatter_add_(1, slots, grad * slope)
