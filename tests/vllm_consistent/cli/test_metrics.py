"""verl's metrics against verl's definitions, and the file that keeps them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from vllm_consistent.cli.demo.errors import RunError
from vllm_consistent.cli.demo.metrics import MetricsFile, plain, spread, verl_comparison

MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_equal_log_probs_give_exact_zeros() -> None:
    values = -torch.rand(2, 3)
    row = verl_comparison(values, values.clone(), MASK)
    assert row.pop("training/rollout_probs_diff_valid") == 1
    assert all(value == 0.0 for value in row.values())


def test_comparison_matches_verl_definitions() -> None:
    rollout = torch.tensor([[-1.0, -2.0, 9.0], [-0.5, 9.0, 9.0]])
    train = torch.tensor([[-1.5, -1.5, -9.0], [-0.25, -9.0, -9.0]])
    row = verl_comparison(rollout, train, MASK)
    pairs = [(-1.0, -1.5), (-2.0, -1.5), (-0.5, -0.25)]
    diffs = [abs(math.exp(a) - math.exp(b)) for a, b in pairs]
    assert row["training/rollout_probs_diff_max"] == pytest.approx(max(diffs))
    assert row["training/rollout_probs_diff_mean"] == pytest.approx(sum(diffs) / 3)
    assert row["rollout_corr/kl"] == pytest.approx(sum(a - b for a, b in pairs) / 3)
    k3 = [math.exp(b - a) - (b - a) - 1 for a, b in pairs]
    assert row["rollout_corr/k3_kl"] == pytest.approx(sum(k3) / 3)
    assert row["rollout_corr/log_ppl_abs_diff"] == pytest.approx((0.0 + 0.25) / 2)


def test_k3_does_not_overflow() -> None:
    one = torch.ones(1, 1, dtype=torch.bool)
    row = verl_comparison(torch.tensor([[-100.0]]), torch.tensor([[0.0]]), one)
    assert math.isfinite(row["rollout_corr/k3_kl"])


def test_spread() -> None:
    assert spread("x", [1.0, 2.0, 6.0]) == {"x/mean": 3.0, "x/max": 6.0, "x/min": 1.0}


def test_file_holds_strict_json_lines(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"a": 1, "b": float("nan")})
    file.append({"a": 2, "b": [float("-inf")]})
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert lines == [{"a": 1, "b": "nan"}, {"a": 2, "b": ["-inf"]}]
    file.rewrite(lines[:1])
    assert file.path.read_text().count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_file_that_cannot_be_written_names_the_path(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "absent" / "metrics.jsonl")
    for write in (file.append, lambda row: file.rewrite([row])):
        with pytest.raises(RunError, match=r"absent/metrics\.jsonl could not be written"):
            write({"a": 1})


def test_plain_keeps_what_json_can_hold() -> None:
    assert plain({"x": (1, 0.5, True, None, "t")}) == {"x": [1, 0.5, True, None, "t"]}
