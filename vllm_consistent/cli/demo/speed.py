"""How fast the two engines roll out one and the same work, measured side by side.

Both engines stay alive and take turns, so that a machine that changes its pace, or serves others,
hits both. Every response has the same fixed length on both sides: stock samples other tokens, and
would else end elsewhere. Prompts are read in every round: prefix caches start empty, and what an
engine then shares between the samples of one prompt is its own doing.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm_consistent.cli.demo.rollout import Rollout, SamplingPlan, sample

ROUNDS = 5
_ENOUGH_S = 60.0
"""No further round starts after this time: an engine without bf16 instructions takes a minute."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Tokens/s of one engine.

    Attributes:
        rollout: of whole rollouts, prompts read.
        decode: of their tokens behind the first; None where responses have one token.
    """

    rollout: float
    decode: float | None


@dataclasses.dataclass(frozen=True)
class Speed:
    """Rounds in which ours and, where it was there, stock rolled out the same work."""

    ours: tuple[Rates, ...]
    stock: tuple[Rates, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            who: [dataclasses.asdict(rates) for rates in getattr(self, who)]
            for who in ("ours", "stock")
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Speed:
        """Read back what `to_dict` returned; raises KeyError or TypeError where it is damaged."""
        return cls(*(tuple(Rates(**rates) for rates in record[who]) for who in ("ours", "stock")))

    def summary(self, name: str) -> dict[str, float | None]:
        """Return the medians of `rollout` or `decode`: ours, stock's, and of a round's ratio."""
        ours, stock = ([getattr(r, name) for r in rates] for rates in (self.ours, self.stock))
        ratios = [a / b for a, b in zip(ours, stock, strict=False) if a and b]
        return {
            "consistent": _median(ours),
            "stock": _median(stock),
            "ratio": _median(ratios),
        }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def warm_up(llm: Any, work: dict[str, Any]) -> None:
    """Let first calls, which compile and allocate, be over.

    Args:
        llm: a vLLM `LLM`.
        work: prompt_ids, seeds, samples, max_tokens and temperature.
    """
    _rollout(llm, work, min(2, work["max_tokens"]))


def time_rollout(llm: Any, work: dict[str, Any]) -> Rates:
    """Roll out `work` once, every response to its full length.

    A rollout of one token a response is timed beside it; what lies between the two is decode.

    Args:
        llm: a vLLM `LLM`.
        work: prompt_ids, seeds, samples, max_tokens and temperature.
    """
    first = _rollout(llm, work, 1)
    whole = _rollout(llm, work, work["max_tokens"])
    tokens, seconds = whole.num_tokens - first.num_tokens, whole.seconds - first.seconds
    decode = tokens / seconds if tokens and seconds > 0 else None
    return Rates(whole.num_tokens / whole.seconds, decode)


def _rollout(llm: Any, work: dict[str, Any], max_tokens: int) -> Rollout:
    llm.reset_prefix_cache()
    plan = SamplingPlan(
        work["samples"], max_tokens, work["temperature"], tuple(work["seeds"]), True
    )
    return sample(llm, work["prompt_ids"], plan)


def compare_speed(ours: Callable[[], Rates], stock: Callable[[], Rates] | None) -> Speed:
    """Let the engines take turns, for `ROUNDS` rounds or a minute, whichever is shorter.

    Args:
        ours: times one rollout; stock: the same of the stock engine, or None without it.
    """
    begin, mine, theirs = time.perf_counter(), [], []
    while not mine or (len(mine) < ROUNDS and time.perf_counter() - begin < _ENOUGH_S):
        mine.append(ours())
        if stock is not None:
            theirs.append(stock())
    return Speed(tuple(mine), tuple(theirs))


def speed_row(speed: Speed) -> dict[str, float]:
    """Return the run's timed rates as metrics, the same on every line; nothing that is unknown."""
    named = {}
    for name in ("rollout", "decode"):
        found = speed.summary(name)
        named |= {
            f"perf/timed_{name}_tokens_per_s": found["consistent"],
            f"stock/perf/timed_{name}_tokens_per_s": found["stock"],
            f"perf/timed_{name}_ratio_to_stock": found["ratio"],
        }
    return {name: value for name, value in named.items() if value is not None}
