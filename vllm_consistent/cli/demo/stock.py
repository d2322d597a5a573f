"""Runs the stock pair in a subprocess and keeps what it measured beside the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from vllm_consistent.cli.demo.comparison import compare
from vllm_consistent.cli.demo.errors import RunError
from vllm_consistent.cli.demo.metrics import Row
from vllm_consistent.cli.demo.speed import ROUNDS, Rates, Speed

_LOG_LINES = 15
_KILL_AFTER_S = 10


@dataclasses.dataclass(frozen=True)
class StepPrompts:
    """The prompts of one step and the seed of each."""

    step: int
    prompt_ids: list[list[int]]
    seeds: list[int]


@dataclasses.dataclass(frozen=True)
class StockResult:
    """What the stock pair measured.

    Attributes:
        steps: by step: num_tokens, seconds, responses (token_ids and both sides' log-probs).
        start_seconds: start of the stock engine.
        speed: the rounds in which it was timed beside the run's engine; None before them.
    """

    steps: dict[int, dict[str, Any]]
    start_seconds: float
    speed: Speed | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        record = dataclasses.asdict(self)
        record["steps"] = {str(step): value for step, value in self.steps.items()}
        record["speed"] = self.speed.to_dict() if self.speed else None
        return record


def load(path: Path) -> StockResult | None:
    """Read back what `to_dict` wrote; None when absent or unreadable: it is measured again."""
    try:
        record = json.loads(path.read_text())
        steps = {int(step): value for step, value in record["steps"].items()}
        for value in steps.values():
            value["num_tokens"], value["seconds"], value["responses"]
        speed = Speed.from_dict(record["speed"]) if record["speed"] else None
        return StockResult(steps, record["start_seconds"], speed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def merged(known: StockResult | None, measured: StockResult) -> StockResult:
    """Return `known` with the steps of `measured` added; the speed stays the first one."""
    if known is None:
        return measured
    return dataclasses.replace(known, steps=known.steps | measured.steps)


def step_row(result: StockResult, step: int) -> Row:
    """Return the stock pair's metrics of `step`, without the stock/ prefix."""
    record = result.steps[step]
    pairs = [(r["rollout_log_probs"], r["train_log_probs"]) for r in record["responses"]]
    width = max(len(rollout) for rollout, _ in pairs)
    padded = torch.zeros(2, len(pairs), width, dtype=torch.float32)
    mask = torch.zeros(len(pairs), width, dtype=torch.bool)
    for row, sides in enumerate(pairs):
        for side, values in enumerate(sides):
            padded[side, row, : len(values)] = torch.tensor(values)
        mask[row, : len(sides[0])] = True
    return {
        **compare(padded[0], padded[1], mask).row,
        "response_length/mean": record["num_tokens"] / len(pairs),
        "perf/rollout_tokens_per_s": record["num_tokens"] / record["seconds"],
    }


class StockPair:
    """The stock worker: it samples and scores at once, then its engine waits to be timed.

    Args:
        model: Hugging Face folder.
        engine: engine arguments, the same as the consistent engine's.
        steps: prompts and seeds, as the consistent engine will get them; may be empty.
        samples: responses per prompt; fewer than the run's are enough here.
        max_tokens: tokens per response.
        temperature: the run's.
        work: what is rolled out when it is timed.
        folder: where request, response and log go.

    Raises:
        RunError: the worker failed; holds the end of its log. So do all methods.
    """

    def __init__(
        self,
        *,
        model: Path,
        engine: dict[str, Any],
        steps: Sequence[StepPrompts],
        samples: int,
        max_tokens: int,
        temperature: float,
        work: dict[str, Any],
        folder: Path,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            "model": str(model),
            "engine": engine,
            "steps": [dataclasses.asdict(step) for step in steps],
            "samples": samples,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "work": work,
        }
        request_path, response_path = folder / "stock-request.json", folder / "stock-response.json"
        request_path.write_text(json.dumps(request))
        response_path.unlink(missing_ok=True)
        self._log = folder / "stock.log"
        self._ahead: Iterator[Rates] | None = None
        with self._log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.stock_worker", request_path, response_path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                # Its own group: an interruption reaches it through us, once, with its children.
                start_new_session=True,
            )
        self._answer()
        response = json.loads(response_path.read_text())
        self.result = StockResult(
            {step["step"]: step for step in response["steps"]}, response["start_seconds"]
        )
        if torch.cuda.is_available():
            # vLLM claims a share of a GPU's memory, so two engines do not stay on one.
            self._ahead = iter([self.time_rollout() for _ in range(ROUNDS)])
            self.close()

    def time_rollout(self) -> Rates:
        """Return tokens/s of the timed work."""
        if self._ahead is not None:
            return next(self._ahead)
        try:
            self._process.stdin.write("time\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        return Rates(**self._answer())

    def close(self) -> None:
        """End the worker."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        _stop(self._process)

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._process.stdout.readline()
        except BaseException:
            self.close()
            raise
        return json.loads(line) if line else self._fail()

    def _fail(self) -> NoReturn:
        code = self._process.wait()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise RunError(
            f"the stock pair's process ended with code {code}; {self._log} ends with:\n{tail}\n"
            "Run with --no-baseline to go on without it."
        )


def _stop(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=_KILL_AFTER_S)
            return
        except subprocess.TimeoutExpired:
            continue
