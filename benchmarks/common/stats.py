"""Ratio of two interleaved series of measurements, with an interval."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from consistent_kernels.errors import invalid

INTERVAL = "95% t interval of the mean log ratio over pairs"

LEAST_PAIRS = 5
"""Pairs of a ratio that is written to a result file."""

LEAST_TOKENS = 16_384
"""Compared tokens of a row that is written to a result file."""

LEAST_LOGPROB = -3.0
"""Mean log-prob of sampled tokens; with less, logits are too flat for a comparison to mean much."""

# 97.5% quantiles of Student's t with 1 to 30 degrees of freedom (any table); beyond, the last one
# is taken, which is the wider choice.
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Ours over stock.

    Attributes:
        median: of the pairs' ratios.
        low, high: `INTERVAL`; it may leave the median out where the ratios are skewed.
        pairs: how many.
    """

    median: float
    low: float
    high: float
    pairs: int


def paired_ratio(ours: Sequence[float], stock: Sequence[float]) -> Ratio:
    """Return the ratio of two series measured in turn; entry i of both is pair i.

    Raises:
        InvalidInputError: fewer than two pairs, unequal lengths, or a value that is not positive.
    """
    if len(ours) != len(stock) or len(ours) < 2:
        raise invalid(
            "paired_ratio", "ours, stock", "two or more pairs", f"{len(ours)} and {len(stock)}"
        )
    if not all(math.isfinite(x) and x > 0 for x in (*ours, *stock)):
        raise invalid("paired_ratio", "ours, stock", "positive and finite", (ours, stock))
    ratios = [a / b for a, b in zip(ours, stock, strict=True)]
    logs = [math.log(ratio) for ratio in ratios]
    centre = statistics.fmean(logs)
    quantile = _T_975[min(len(logs) - 1, len(_T_975)) - 1]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(
        statistics.median(ratios), math.exp(centre - half), math.exp(centre + half), len(ratios)
    )


def require_pairs(op: str, pairs: int) -> None:
    """Raise InvalidInputError where a ratio of so many pairs must not be written."""
    if pairs < LEAST_PAIRS:
        raise invalid(op, "pairs", f"{LEAST_PAIRS} or more where rows are written", pairs)


def require_tokens(op: str, name: str, tokens: int) -> None:
    """Raise InvalidInputError where rows of so few compared tokens must not be written."""
    if tokens < LEAST_TOKENS:
        raise invalid(op, name, f"{LEAST_TOKENS} or more where rows are written", tokens)


def in_turns(names: Iterable[str], rounds: int) -> list[str]:
    """Return the order of the runs: A B, B A, A B, ..., so that a drift hits all alike."""
    names = list(names)
    order: list[str] = []
    for turn in range(rounds):
        order += names if turn % 2 == 0 else reversed(names)
    return order
