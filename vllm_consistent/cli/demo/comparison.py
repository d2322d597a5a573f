"""One comparison of rollout and trainer log-probs, as metrics and as the first difference."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from vllm_consistent.cli.demo.metrics import Row, verl_comparison


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Result over the response tokens of a step.

    Attributes:
        row: true_on_policy/* and verl's own metrics.
        first: the first differing token as {"row", "position", "values"}, or None.
    """

    row: Row
    first: dict[str, Any] | None

    @property
    def equal(self) -> bool:
        """Whether every token is bit-equal."""
        return self.first is None


def compare(rollout: Tensor, train: Tensor, mask: Tensor) -> Comparison:
    """Compare bit patterns; a non-finite value is a difference.

    Args:
        rollout: [B, R] fp32, the engine's.
        train: [B, R] fp32, the trainer's.
        mask: [B, R] bool, True on response tokens.
    """
    wrong = ((rollout.view(torch.int32) != train.view(torch.int32)) | ~rollout.isfinite() | ~train.isfinite()) & mask
    d = (rollout - train).abs()[mask].double()
    lr = (train.double() - rollout.double())[mask]
    row = {
        "true_on_policy/mismatched_tokens": int(wrong.sum()),
        "true_on_policy/num_tokens": int(mask.sum()),
        "true_on_policy/logprob_abs_diff_max": d.max().item(),
        "true_on_policy/logprob_abs_diff_mean": d.mean().item(),
        "true_on_policy/logprob_abs_diff_std": d.std(correction=0).item(),
        "true_on_policy/k3_kl": (torch.expm1(lr) - lr).mean().item(),
        "true_on_policy/bitwise_equal": int(not wrong.any()),
    }
    row |= verl_comparison(rollout, train, mask)
    first = None
    if wrong.any():
        r, p = wrong.nonzero()[0].tolist()
        first = {"row": r, "position": p, "values": {"rollout": f"0x{rollout[r,p].view(torch.int32).item() & 0xffffffff:08x}"}}
    return Comparison(row, first)
