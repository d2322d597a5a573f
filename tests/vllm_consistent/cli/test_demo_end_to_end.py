"""The whole demo on a tiny random model: real vLLM, real trainer, real stock pair."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_consistent.cli import exit_codes

SMALL = ("--prompts", "2", "--samples", "3", "--max-tokens", "6")
_START_LIMIT_S = 300


def command(*arguments: object) -> list[str]:
    program = "from vllm_consistent.cli.main import app; app()"
    return [sys.executable, "-c", program, "demo", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=600)


def engine_log(out: Path) -> str:
    """The end of the engine's messages, with the traceback of an unexpected error."""
    log = out / "logs" / "engine.log"
    return "\n".join(log.read_text().splitlines()[-30:]) if log.is_file() else "no engine log"


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_bit_equal(row: dict[str, Any]) -> None:
    assert row["true_on_policy/num_tokens"] > 0
    assert row["true_on_policy/mismatched_tokens"] == 0
    assert row["true_on_policy/bitwise_equal"] == 1
    for name in ("logprob_abs_diff_max", "logprob_abs_diff_mean", "logprob_abs_diff_std", "k3_kl"):
        assert row[f"true_on_policy/{name}"] == 0.0
    assert row["actor/ratio_diff_max"] == 0.0


@pytest.mark.engine
def test_demo_is_bit_equal_and_stock_is_not(tmp_path: Path, tiny_checkpoint: Path) -> None:
    out = tmp_path / "out"
    done = run("--out", out, "--model", tiny_checkpoint, "--steps", 2, "--json", *SMALL)
    assert done.returncode == exit_codes.OK, done.stderr + engine_log(out)
    summary = json.loads(done.stdout)
    assert summary["status"] == "bit-equal"
    assert summary["mismatched_tokens"] == 0
    rows = rows_of(out)
    assert len(rows) == 2
    for row in rows:
        assert_bit_equal(row)
        assert row["actor/grad_norm"] > 0
        assert row["weights/changed_values"] > 0
        assert row["stock/true_on_policy/num_tokens"] > 0
    assert summary["stock"]["mismatched_share"] > 0.9, "the negative control found no difference"
    assert summary["throughput"]["ratio"] > 0
    assert summary["consistency_report"]["foreign_layers"] == []
    assert "equal bit for bit" in (out / "report.html").read_text()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.engine
def test_demo_interrupted_resumes_at_zero(tmp_path: Path, tiny_checkpoint: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--out", out, "--no-baseline", "--temperature", 0.7, "--model", tiny_checkpoint)
    process = subprocess.Popen(
        command(*arguments, "--steps", 1000, *SMALL),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + _START_LIMIT_S
    while not (out / "metrics.jsonl").is_file() and process.poll() is None:
        assert time.monotonic() < deadline, "no step within the time limit"
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == exit_codes.INTERRUPTED, errors + engine_log(out)
    done_before = len(rows_of(out))
    assert done_before >= 1, errors + engine_log(out)
    assert "it was interrupted" in (out / "report.html").read_text()
    resumed = run("--resume", "--out", out, "--steps", done_before + 1)
    assert resumed.returncode == exit_codes.OK, resumed.stderr + engine_log(out)
    rows = rows_of(out)
    assert [row["training/global_step"] for row in rows] == list(range(done_before + 1))
    for row in rows:
        assert_bit_equal(row)
    versions = [row["weights/version"] for row in rows]
    assert versions == list(range(1, done_before + 2))
