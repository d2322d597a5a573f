"""One comparison of rollout and trainer log-probs, as metrics and as the first difference."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from consistent_kernels.protocol import TokenMismatch, compare_logprobs
from vllm_consistent.cli.demo.metrics import Row


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Result over the response tokens of a step.

    Attributes:
        row: true_on_policy/* and verl's own mismatch metrics.
        equal: whether every token is bit-equal.
        first: the first token that is not, or None.
    """

    row: Row
    equal: bool
    first: TokenMismatch | None


def compare(rollout: Tensor, train: Tensor, mask: Tensor) -> Comparison:
    """Compare the log-probs of a step; see `compare_logprobs`.

    Args:
        rollout: [B, R] fp32, the engine's; NaN where it returned none.
        train: [B, R] fp32, the trainer's.
        mask: [B, R] bool, True on response tokens.
    """
    report = compare_logprobs(rollout, train, mask)
    return Comparison(report.metrics(), report.bitwise_equal, report.first)
