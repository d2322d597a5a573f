"""The run in one JSON object: printed by --json, stored as summary.json, read by the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from vllm_consistent.cli import exit_codes
from vllm_consistent.cli.demo.hardware import hardware, peak_memory_gb, versions
from vllm_consistent.cli.demo.metrics import STOCK, Row
from vllm_consistent.cli.demo.output import OutputFolder
from vllm_consistent.cli.demo.plan import STOCK_SAMPLES, STOCK_TOKENS, Plan
from vllm_consistent.cli.demo.speed import Speed
from vllm_consistent.cli.demo.stock import StockResult

_STATUS = {
    exit_codes.OK: "bit-equal",
    exit_codes.MISMATCH: "mismatch",
    exit_codes.FAILED: "failed",
    exit_codes.INTERRUPTED: "interrupted",
}


class Reached(Protocol):
    """What a run has reached, finished or not (`run.DemoRun`)."""

    plan: Plan
    problems: str
    output: OutputFolder
    rows: list[Row]
    stock: StockResult | None
    speed: Speed | None
    consistency: dict[str, Any] | None
    contract: dict[str, str] | None
    first_mismatch: dict[str, Any] | None

    @property
    def seconds(self) -> float:
        """How long it has run, earlier parts included."""


def summarize(run: Reached, code: int, stopped_because: str | None) -> dict[str, Any]:
    """Return the summary of `run`, finished or not.

    Args:
        run: the run.
        code: its exit code.
        stopped_because: why it stopped early, or None.
    """
    rows, options = run.rows, run.plan.options
    return {
        "status": _STATUS[code],
        "exit_code": code,
        "stopped_because": stopped_because,
        "not_written": [],
        "steps_done": len(rows),
        "steps": options.steps,
        **_compared(rows, ""),
        "first_mismatch": run.first_mismatch,
        "stock": _stock(rows, options.samples, options.max_tokens),
        "throughput": _throughput(run),
        "training": _training(rows),
        "contract": run.contract,
        "model": {
            "name": run.plan.source.name,
            "folder": str(run.plan.source.path),
            "fingerprint": run.plan.source.fingerprint,
        },
        "problems": run.problems,
        "options": options.to_dict(),
        "versions": versions(),
        "hardware": hardware(),
        "peak_memory_gb": peak_memory_gb(),
        "seconds": run.seconds,
        "files": {
            "report": str(run.output.report),
            "metrics": str(run.output.metrics),
            "checkpoints": str(run.output.checkpoints),
        },
        "consistency_report": run.consistency,
    }


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name) is not None]


def _largest(values: Sequence[float]) -> float | None:
    """Return the maximum; NaN when any is NaN, None when there are none."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values, default=None)


def _compared(rows: Sequence[Row], prefix: str) -> dict[str, Any]:
    name = f"{prefix}true_on_policy/"
    tokens = int(sum(_column(rows, f"{name}num_tokens")))
    wrong = int(sum(_column(rows, f"{name}mismatched_tokens")))
    return {
        "tokens": tokens,
        "mismatched_tokens": wrong,
        "bitwise_equal": tokens > 0 and wrong == 0,
        "logprob_abs_diff_max": _largest(_column(rows, f"{name}logprob_abs_diff_max")),
        "k3_kl_max": _largest(_column(rows, f"{name}k3_kl")),
    }


def _stock(rows: Sequence[Row], samples: int, max_tokens: int) -> dict[str, Any] | None:
    compared = _compared(rows, STOCK)
    if not compared["tokens"]:
        return None
    return {
        **compared,
        "mismatched_share": compared["mismatched_tokens"] / compared["tokens"],
        "samples": min(STOCK_SAMPLES, samples),
        "max_tokens": min(STOCK_TOKENS, max_tokens),
    }


def _throughput(run: Reached) -> dict[str, Any]:
    """Whole rollouts of equal work on both engines, and decode alone under `decode`."""
    work, speed = run.plan.work, run.speed or Speed((), ())
    return {
        **speed.summary("rollout"),
        "decode": speed.summary("decode"),
        "rounds": len(speed.ours),
        "concurrency": len(work["prompt_ids"]) * work["samples"],
        "tokens_per_response": work["max_tokens"],
    }


def _training(rows: Sequence[Row]) -> dict[str, Any] | None:
    norms = _column(rows, "actor/grad_norm")
    if not norms:
        return None
    return {
        "reward_first": rows[0]["critic/rewards/mean"],
        "reward_last": rows[-1]["critic/rewards/mean"],
        "accuracy_mean": sum(_column(rows, "reward/accuracy")) / len(rows),
        "grad_norm_min": min(norms),
        "grad_norm_max": max(norms),
        "weights_changed": sum(_column(rows, "weights/changed_values")) > 0,
    }
