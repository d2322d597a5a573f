"""What travels between the processes, and the comparison of two sides' log-probs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from consistent_kernels.testing import integer_view


@dataclasses.dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        prompt_ids, token_ids: what was asked and what was sampled.
        logprobs: [len(token_ids)] fp32, at temperature 1.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray

    @property
    def sequence(self) -> list[int]:
        """Prompt and response."""
        return [*self.prompt_ids, *self.token_ids]


@dataclasses.dataclass
class Comparison:
    """How the sampled log-probs compare with the other scores of the same tokens.

    Attributes:
        tokens: compared.
        mean_logprob: of the sampled tokens.
        engine: tokens whose log-prob differs in a bit from the engine's own score of them.
        trainer: likewise from the trainer's; None where no trainer scored them.
        mismatched: tokens that differ in either.
        first: where, in words; None where nothing differs.
    """

    tokens: int
    mean_logprob: float
    engine: int
    trainer: int | None
    mismatched: int
    first: str | None


def compare(
    samples: Sequence[Sample],
    rescored: Sequence[np.ndarray],
    trained: Sequence[np.ndarray] | None,
) -> Comparison:
    """Compare bit patterns of the sampled log-probs with one or two other scores.

    Args:
        samples: at least one token.
        rescored: for each sample [len(token_ids)] fp32, by the engine.
        trained: likewise by the trainer, or None.
    """
    sampled = _joined([sample.logprobs for sample in samples])
    engine = _differs(sampled, _joined(rescored))
    trainer = None if trained is None else _differs(sampled, _joined(trained))
    either = engine if trainer is None else engine | trainer
    first = None
    if bool(either.any()):
        index = int(either.nonzero()[0])
        names = [(s, t) for s, sample in enumerate(samples) for t in range(len(sample.token_ids))]
        values = {"sampled": sampled, "engine": _joined(rescored)}
        if trained is not None:
            values["trainer"] = _joined(trained)
        shown = ", ".join(f"{name} {values[name][index].item()!r}" for name in values)
        request, token = names[index]
        first = f"request {request}, token {token}: {shown}"
    return Comparison(
        tokens=len(sampled),
        mean_logprob=float(sampled.double().mean()),
        engine=int(engine.sum()),
        trainer=None if trainer is None else int(trainer.sum()),
        mismatched=int(either.sum()),
        first=first,
    )


def _joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(part, np.float32) for part in parts]))


def _differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return integer_view(a) != integer_view(b)


def enough(samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """Return evenly spaced samples that hold at least `tokens`, or all of them."""
    total = sum(len(sample.token_ids) for sample in samples)
    if total <= tokens:
        return list(samples)
    count = len(samples)
    for taken in range(1, count + 1):
        picked = [samples[i * count // taken] for i in range(taken)]
        if sum(len(sample.token_ids) for sample in picked) >= tokens:
            return picked
    return list(samples)
