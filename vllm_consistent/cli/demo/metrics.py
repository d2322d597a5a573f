"""The numbers of a step under verl's names, and the file that keeps one line per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_consistent.cli.demo.errors import RunError

STOCK = "stock/"
Row = dict[str, Any]


def verl_comparison(rollout: Tensor, train: Tensor, mask: Tensor) -> Row:
    """Return verl's own mismatch metrics over the response tokens.

    Args:
        rollout: [B, R] fp32 engine log-probs.
        train: [B, R] fp32 trainer log-probs of the same tokens (verl's old_log_probs).
        mask: [B, R] bool response mask.

    Returns:
        training/rollout_probs_diff_* on probabilities, and rollout_corr/* on log-probs, as
        verl/utils/debug/metrics.py and verl/trainer/ppo/rollout_corr_helper.py define them, in
        fp64. verl's probabilities hide small differences: true_on_policy/* are the strict ones.
    """
    ours, theirs = rollout[mask].double(), train[mask].double()
    probs_diff = (ours.exp() - theirs.exp()).abs()
    log_ratio = theirs - ours
    return {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": probs_diff.max().item(),
        "training/rollout_probs_diff_mean": probs_diff.mean().item(),
        "training/rollout_probs_diff_std": probs_diff.std(correction=0).item(),
        "rollout_corr/kl": -log_ratio.mean().item(),
        "rollout_corr/k3_kl": (torch.expm1(log_ratio) - log_ratio).mean().item(),
        "rollout_corr/log_ppl_abs_diff": _log_ppl_abs_diff(rollout, train, mask),
    }


def _log_ppl_abs_diff(rollout: Tensor, train: Tensor, mask: Tensor) -> float:
    weight = mask.double() / mask.sum(dim=1, keepdim=True)
    difference = torch.where(mask, train.double() - rollout.double(), 0.0)
    return (difference * weight).sum(dim=1).abs().mean().item()


def spread(name: str, values: Sequence[float]) -> Row:
    """Return {name/mean, name/max, name/min}."""
    return {
        f"{name}/mean": math.fsum(values) / len(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }


def prefixed(prefix: str, row: Mapping[str, Any]) -> Row:
    """Return `row` with `prefix` before every name."""
    return {f"{prefix}{name}": value for name, value in row.items()}


def plain(value: Any) -> Any:
    """Return JSON types only; a non-finite float becomes its text, which strict JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class MetricsFile:
    """`metrics.jsonl`: one JSON object per finished step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Row) -> None:
        """Add the line of a step.

        Raises:
            RunError: it could not be written.
        """
        try:
            with self.path.open("a") as stream:
                stream.write(_line(row))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise RunError(f"{self.path} could not be written: {error}") from error

    def rewrite(self, rows: Sequence[Row]) -> None:
        """Replace the file by `rows`, at once: what a resumed run starts from.

        Raises:
            RunError: it could not be written; the file is as before.
        """
        write_atomically(self.path, "".join(map(_line, rows)))


def _line(row: Row) -> str:
    return json.dumps(plain(row), allow_nan=False) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename it into place.

    Raises:
        RunError: it could not be written; `path` is as before.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written: {error}") from error
