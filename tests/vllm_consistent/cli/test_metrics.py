"""The file that keeps a run's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_consistent.cli.demo.errors import RunError
from vllm_consistent.cli.demo.metrics import MetricsFile, plain, spread


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
