"""GRPO's arithmetic against independent fp64 derivations."""

from __future__ import annotations

import pytest
import torch

from vllm_consistent.cli.demo.grpo import CLIP_RATIO, group_advantages, policy_loss


def test_advantages_match_an_fp64_derivation() -> None:
    rewards = torch.tensor([[1.1, 0.1, 0.0, 0.12], [0.3, 0.2, 0.1, 0.0]])
    exact = rewards.double()
    mean = exact.mean(1, keepdim=True)
    deviation = ((exact - mean) ** 2).sum(1, keepdim=True).div(3).sqrt()
    # Some ten fp32 roundings of values below 4: 10 * 4 * 2^-24 < 3e-6.
    torch.testing.assert_close(
        group_advantages(rewards).double(), (exact - mean) / (deviation + 1e-6), atol=3e-6, rtol=0
    )


@pytest.mark.parametrize("value", [0.0, 0.1, 1.1, 1 / 3])
def test_advantages_of_equal_rewards_are_exactly_zero(value: float) -> None:
    # fp32 means of three equal values can be off by an ulp, which the division would blow up.
    assert torch.count_nonzero(group_advantages(torch.full((2, 3), value))) == 0


def test_first_update_has_ratio_one_and_gradient_minus_advantage() -> None:
    old = -torch.rand(3, 5)
    new = old.clone().requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    advantages = torch.tensor([1.5, -0.5, 0.0])
    result = policy_loss(new, old, advantages, mask)
    result.loss.backward()
    assert result.ratio_max == 0.0
    assert result.negative_log_ratio == 0.0
    assert result.clipped == 0.0
    expected = -advantages[:, None] * mask
    assert torch.equal(new.grad, expected)


def test_loss_clips_only_where_it_would_help() -> None:
    log_ratio = torch.tensor([[0.5, -0.5], [0.5, -0.5]])
    old = torch.full((2, 2), -1.0)
    new = (old + log_ratio).requires_grad_()
    advantages = torch.tensor([1.0, -1.0])
    result = policy_loss(new, old, advantages, torch.ones(2, 2, dtype=torch.bool))
    result.loss.backward()
    # A > 0 clips above 1 + c; A < 0 clips below 1 - c; the other two keep their gradient.
    assert (new.grad != 0).tolist() == [[False, True], [True, False]]
    assert result.clipped == 2.0
    ratio = log_ratio.double().exp()
    exact = -(1 + CLIP_RATIO) - ratio[0, 1] + ratio[1, 0] + (1 - CLIP_RATIO)
    # Four terms below 2, a few fp32 roundings each: 4 * 4 * 2 * 2^-24 < 2e-6.
    assert result.loss.item() == pytest.approx(exact.item(), abs=2e-6)


def test_loss_ignores_padding_of_any_value() -> None:
    old = torch.tensor([[-1.0, float("nan")]])
    new = torch.tensor([[-1.0, float("inf")]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    result = policy_loss(new, old, torch.ones(1), mask)
    result.loss.backward()
    assert result.loss.item() == -1.0
    assert new.grad[0, 0].item() == -1.0
    assert new.grad[0, 1].item() == 0.0
