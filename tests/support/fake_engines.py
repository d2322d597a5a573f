"""Engines and trainers of the rollout benchmark that run no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks.rollout import session
from benchmarks.rollout.process import ProcessError
from benchmarks.rollout.samples import Sample
from benchmarks.rollout.variants import STOCK

LOGPROB = np.float32(-0.7)
NEXT = np.nextafter(LOGPROB, np.float32(0))


class Fake:
    """Stands for an engine's or a trainer's process; `faults` names what goes wrong.

    Faults: (variant, role, method) -> "one bit" flips a score, an exception is raised,
    of a list the last entry is taken.
    """

    faults: ClassVar[dict[tuple[str, str, str], Any]] = {}
    calls: ClassVar[list[tuple[str, str]]] = []
    logprob: ClassVar[np.float32] = LOGPROB

    def __init__(self, name: str, module: str, environment: dict[str, str], logs: Path) -> None:
        role = "trainer" if name.endswith("-trainer") else "engine"
        self.variant = name.removesuffix("-trainer").rpartition("-")[2]
        self.role = role
        self.environment = environment
        self.answers: list[Any] = []
        self.closed = False

    def send(self, method: str, **arguments: Any) -> None:
        self.answers.append((method, arguments))

    def result(self) -> Any:
        method, arguments = self.answers.pop(0)
        Fake.calls.append((self.variant, method))
        fault = self.faults.get((self.variant, self.role, method))
        if isinstance(fault, list):
            fault = fault.pop()
        if isinstance(fault, Exception):
            raise fault
        return getattr(self, method)(fault, **arguments)

    def call(self, method: str, **arguments: Any) -> Any:
        self.send(method, **arguments)
        return self.result()

    def close(self) -> None:
        self.closed = True

    def prepare(self, fault: Any) -> None:
        return None

    def load(self, fault: Any, model: str) -> None:
        return None

    def bridge(self, fault: Any, device: str, contract: Any) -> None:
        return None

    def start(self, fault: Any, model: str, arguments: Any, consistent: bool) -> dict[str, Any]:
        report = {"digest": "d1", "runner": "V2"} if consistent else None
        started = {"seconds": 30.0, "contract": {"name": "made up"}, "report": report}
        return started | {"environment": {"VLLM_OF": self.variant}}

    def rollout(
        self, fault: Any, prompts: Any, tokens: int, measure: str, cached: bool
    ) -> dict[str, Any]:
        scores = np.full(tokens, self.logprob, np.float32)
        samples = [Sample(ids, [5] * tokens, scores) for ids in prompts]
        return {"value": 80.0 if self.variant != STOCK else 100.0, "samples": samples}

    def begin(self, fault: Any, prompts: Any, tokens: int, cached: bool) -> None:
        self.round = self.rollout(None, prompts, tokens, "", cached)
        self.slices = 0

    def advance(self, fault: Any, steps: int, core: int) -> dict[str, Any]:
        """Two slices, each half of the round."""
        self.slices += 1
        samples = self.round["samples"]
        tokens = sum(len(sample.token_ids) for sample in samples)
        return {
            "seconds": tokens / 2 / self.round["value"],
            "tokens": tokens * self.slices // 2,
            "started": len(samples),
            "unfinished": self.slices < 2,
        }

    def finish(self, fault: Any) -> list[Sample]:
        return self.round["samples"]

    def score(self, fault: Any, samples: list[Sample], **options: Any) -> list[np.ndarray]:
        scores = [sample.logprobs.copy() for sample in samples]
        if fault == "one bit":
            scores[-1][-1] = np.nextafter(scores[-1][-1], np.float32(0))
        return scores

    def profile(self, fault: Any, prompts: Any, steps: int) -> dict[str, Any]:
        return {"steps": steps, "kernels": []}

    def profile_prefill(self, fault: Any, prompts: Any) -> dict[str, Any]:
        return {"steps": len(prompts), "kernels": []}


def use_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sessions start `Fake`s, without a fault."""
    monkeypatch.setattr(session, "Process", Fake)
    monkeypatch.setattr(Fake, "faults", {})
    monkeypatch.setattr(Fake, "calls", [])
    monkeypatch.setattr(Fake, "logprob", LOGPROB)


def dies_after(variant: str, method: str, calls: int) -> None:
    """Let an engine answer `calls` calls of a method and die in the next one."""
    Fake.faults[(variant, "engine", method)] = [ProcessError("it died")] + [None] * calls
