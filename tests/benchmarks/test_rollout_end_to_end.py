"""The whole rollout benchmark on a CPU: real engines, a real trainer, a tiny random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.record import ROOT


@pytest.mark.engine
def test_tiny_rollout_benchmark_end_to_end(tmp_path: Path) -> None:
    out, profile = tmp_path / "rows.json", tmp_path / "profile.json"
    arguments = [
        *("--tiny", "--work", "qwen3_8b.256", "--work", "qwen3_8b.32k"),
        *("--work", "qwen3_8b.ttft2k"),
        *("--pairs", "2", "--warmups", "0", "--parity-tokens", "20", "--commit", "6" * 40),
        *("--scratch", tmp_path / "scratch", "--out", out, "--profile", profile),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rollout", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    rows = json.loads(out.read_text())
    assert len(rows) == 3
    for row in rows:
        assert row["ratio_to_stock"] > 0
        assert row["compared_tokens"] >= 20
        assert (row["mismatched_engine"], row["mismatched_trainer"]) == (0, 0)
        assert row["mean_logprob"] > -3, "flat logits hide mismatches"
        assert row["start_seconds"]["cache"] == "cold"
    for entry in json.loads(profile.read_text()):
        assert entry["wall_us_per_step"] > 0
        assert entry["kernels"]
    assert "start engines" in done.stderr, "phases are timed"
