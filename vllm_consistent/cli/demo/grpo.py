"""GRPO's arithmetic: group-normalised advantages and the clipped, token-mean policy loss."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

CLIP_RATIO = 0.2
_STD_EPSILON = 1e-6  # as verl's compute_grpo_outcome_advantage


def group_advantages(rewards: Tensor) -> Tensor:
    """Return (r - mean) / (std + 1e-6) within each group.

    Args:
        rewards: [prompts, samples] fp32; std is the unbiased one.

    Returns:
        [prompts, samples] fp32; exactly 0 in a group of equal rewards.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    # The mean of equal fp32 values may be one ulp off: such a group must not get an advantage.
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    normalised = centred / (rewards.std(dim=1, keepdim=True) + _STD_EPSILON)
    return torch.where(equal, torch.zeros_like(normalised), normalised)


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Sums over the tokens of one micro-batch; divide by the batch's token count.

    Attributes:
        loss: sum of max(-A r, -A clip(r, 1 - 0.2, 1 + 0.2)), with the graph.
        clipped: tokens where the clip was active.
        negative_log_ratio: sum of old - new log-prob, for `actor/ppo_kl`.
        ratio_max: largest |r - 1|; exactly 0 for the first update on policy.
    """

    loss: Tensor
    clipped: float
    negative_log_ratio: float
    ratio_max: float


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> PolicyLoss:
    """Return PPO's clipped loss, summed over the response tokens.

    Args:
        log_probs: [B, R] fp32 of the current weights, with gradient.
        old_log_probs: [B, R] fp32: the rollout's own, bit for bit.
        advantages: [B] fp32, one per response.
        mask: [B, R] bool, True on response tokens.
    """
    log_ratio = torch.where(mask, log_probs - old_log_probs, torch.zeros_like(log_probs))
    ratio = log_ratio.exp()
    advantage = advantages[:, None]
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - CLIP_RATIO, 1.0 + CLIP_RATIO)
    loss = torch.where(mask, torch.maximum(plain, clipped), torch.zeros_like(plain)).sum()
    with torch.no_grad():
        active = ((clipped > plain) & mask).sum().item()
        ratio_max = (ratio - 1.0).abs().max().item() if ratio.numel() else 0.0
        negative = -log_ratio.double().sum().item()
    return PolicyLoss(loss, float(active), negative, ratio_max)
