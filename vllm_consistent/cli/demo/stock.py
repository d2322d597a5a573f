"""Runs the stock pair in a subprocess and keeps what it measured beside the run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_consistent.cli.demo.comparison import compare
from vllm_consistent.cli.demo.errors import RunError
from vllm_consistent.cli.demo.metrics import Row

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
        tokens_per_s: decode throughput at the run's own concurrency; None when not asked for.
        start_seconds: start of the stock engine.
    """

    steps: dict[int, dict[str, Any]]
    tokens_per_s: float | None
    start_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        record = dataclasses.asdict(self)
        record["steps"] = {str(step): value for step, value in self.steps.items()}
        return record


def load(path: Path) -> StockResult | None:
    """Read back what `to_dict` wrote; None when absent or unreadable: it is measured again."""
    try:
        record = json.loads(path.read_text())
        steps = {int(step): value for step, value in record["steps"].items()}
        for value in steps.values():
            value["num_tokens"], value["seconds"], value["responses"]
        return StockResult(steps, record["tokens_per_s"], record["start_seconds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def merged(known: StockResult | None, measured: StockResult) -> StockResult:
    """Return `known` with the steps of `measured` added; the throughput stays the first one."""
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


def measure(
    *,
    model: Path,
    engine: dict[str, Any],
    steps: Sequence[StepPrompts],
    samples: int,
    max_tokens: int,
    temperature: float,
    probe: dict[str, Any] | None,
    folder: Path,
) -> StockResult:
    """Start the stock worker, wait for it and return its result.

    Args:
        model: Hugging Face folder.
        engine: engine arguments, the same as the consistent engine's.
        steps: prompts and seeds, as the consistent engine will get them.
        samples: responses per prompt; fewer than the run's are enough here.
        max_tokens: tokens per response.
        temperature: the run's.
        probe: prompts, seeds, samples and max_tokens of the timed batch; None to skip it.
        folder: where request, response and log go.

    Raises:
        RunError: the worker failed; holds the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = {
        "model": str(model),
        "engine": engine,
        "steps": [dataclasses.asdict(step) for step in steps],
        "samples": samples,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "probe": probe,
    }
    request_path, response_path = folder / "stock-request.json", folder / "stock-response.json"
    request_path.write_text(json.dumps(request))
    response_path.unlink(missing_ok=True)
    log = folder / "stock.log"
    _run(
        [sys.executable, "-m", f"{__package__}.stock_worker", request_path, response_path],
        log,
    )
    response = json.loads(response_path.read_text())
    return StockResult(
        {step["step"]: step for step in response["steps"]},
        response["tokens_per_s"],
        response["start_seconds"],
    )


def _run(command: list[Any], log: Path) -> None:
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # Its own group: an interruption reaches it through us, once, with its children.
            start_new_session=True,
        )
        try:
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise RunError(
            f"the stock pair's process ended with code {code}; {log} ends with:\n{tail}\n"
            "Run with --no-baseline to go on without it."
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
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
