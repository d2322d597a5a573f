"""The rollout benchmark's command without engines: exit codes, what is kept, bad arguments."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engines import Fake, use_fakes
from typer.testing import CliRunner

from benchmarks.rollout import run
from benchmarks.rollout.process import ProcessError
from benchmarks.rollout.session import ModelSession
from benchmarks.rollout.variants import STOCK
from benchmarks.rollout.works import WORKS
from consistent_kernels.errors import InvalidInputError


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(run.app, list(arguments))


def tiny_arguments(folder: Path) -> tuple[str, ...]:
    work = ("--tiny", "--work", "qwen3_0_6b.1", "--parity-tokens", "12", "--commit", "4" * 40)
    return (*work, "--scratch", str(folder / "scratch"), "--out", str(folder / "rows.json"))


def test_command_writes_rows_and_profiles(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    done = invoke(*tiny_arguments(tmp_path), "--profile", str(profile))
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["commit"] == "4" * 40
    assert row["versions"]["torch"]
    assert {p["variant"] for p in json.loads(profile.read_text())} == {STOCK, "consistent"}


def test_command_exits_with_1_and_reports_no_speed(tmp_path: Path) -> None:
    Fake.faults[("consistent", "trainer", "score")] = "one bit"
    done = invoke(*tiny_arguments(tmp_path))
    assert done.exit_code == 1
    assert "no speed is reported" in done.output
    assert json.loads((tmp_path / "rows.json").read_text()) == []
    assert "0.800" not in done.output, "the ratio must not appear"


def test_command_exits_with_3_when_an_engine_breaks(tmp_path: Path) -> None:
    Fake.faults[("batch_invariant", "engine", "start")] = ProcessError("no such backend")
    both = ("--variant", "consistent", "--variant", "batch_invariant")
    done = invoke(*tiny_arguments(tmp_path), *both)
    assert done.exit_code == 3
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 1
    Fake.faults[(STOCK, "engine", "start")] = ProcessError("no memory")
    assert invoke(*tiny_arguments(tmp_path)).exit_code == 3


def test_command_seats_variants_that_do_not_fit_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_by_two(loads: Any, wanted: Any, free: int) -> Any:
        return [[(0, [wanted[0], one])] for one in wanted[1:]]

    monkeypatch.setattr(run, "waves", two_by_two)
    Fake.faults[(STOCK, "engine", "start")] = [None, ProcessError("no memory"), None]
    names = ("consistent", "triton", "batch_invariant")
    asked = [word for name in names for word in ("--variant", name)]
    done = invoke(*tiny_arguments(tmp_path), *asked)
    assert done.exit_code == 3
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["variant"] for row in rows] == ["consistent", "batch_invariant"]
    states = [row["start_seconds"]["cache"] for row in rows]
    assert states == ["cold", "cold, stock's warm"]


def test_command_checks_parity_alone(tmp_path: Path) -> None:
    done = invoke(*tiny_arguments(tmp_path), "--parity-only")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "rows.json").read_text()) == []
    assert {variant for variant, _ in Fake.calls} == {"consistent"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--work", "nonsense"], "work 'nonsense' is not supported"),
        (["--variant", "stock"], "impl 'stock' is not supported"),
        (["--engine-arg", "max_num_seqs"], "NAME=JSON"),
        (["--engine-arg", "a=b"], "NAME=JSON"),
        (["--pairs", "1"], "greater than or equal to 2"),
    ],
)
def test_command_rejects_bad_arguments(arguments: list[str], text: str) -> None:
    done = invoke("--tiny", "--commit", "5" * 40, *arguments)
    assert done.exit_code == 2, done.output
    assert text in done.output


@pytest.mark.parametrize("few", ["--pairs", "--peer-pairs"])
def test_command_writes_no_ratio_of_fewer_than_five_pairs(tmp_path: Path, few: str) -> None:
    done = invoke("--commit", "5" * 40, "--out", str(tmp_path / "rows.json"), few, "4")
    assert done.exit_code == 2
    assert "5 or more where rows are written" in done.output


def test_command_writes_no_ratio_of_fewer_than_16384_tokens(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "rows.json"))
    done = invoke("--commit", "5" * 40, *out, "--parity-tokens", "16383")
    assert done.exit_code == 2
    assert "16384 or more where rows are written" in done.output


@pytest.mark.parametrize("text", ["not json", '[{"hardware": "another machine"}]'])
def test_command_looks_at_its_files_before_it_starts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    done = invoke(*tiny_arguments(tmp_path))
    assert done.exit_code == 2
    assert str(path) in done.output
    assert Fake.calls == []
    assert path.read_text() == text


def test_command_rejects_one_file_for_rows_and_profiles(tmp_path: Path) -> None:
    done = invoke(*tiny_arguments(tmp_path), "--profile", str(tmp_path / "rows.json"))
    assert done.exit_code == 2
    assert "named twice" in done.output


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("a fault of ours"), 3)]
)
def test_command_keeps_rows_when_it_is_cut_short(
    error: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two works is cut off where its log-probs are compared."""
    judged = ModelSession._judge

    def judge(self: ModelSession, seat: Any, work: Any, *rest: Any) -> None:
        if work.key == "qwen3_8b.1":
            raise error
        judged(self, seat, work, *rest)

    monkeypatch.setattr(ModelSession, "_judge", judge)
    works = ("--work", "qwen3_8b.256", "--work", "qwen3_8b.1")
    base = ("--tiny", "--parity-tokens", "12", "--commit", "4" * 40)
    done = invoke(*base, *works, "--out", str(tmp_path / "rows.json"))
    assert done.exit_code == code
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert "256 requests" in row["work"]


def test_command_ends_on_sigterm_as_on_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `timeout` sends: checkpoints of gigabytes must not stay in memory."""
    monkeypatch.setattr(run, "_roomy", lambda: str(tmp_path))

    def terminate(self: ModelSession) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ModelSession, "time", terminate)
    before = signal.getsignal(signal.SIGTERM)
    done = invoke("--tiny", "--work", "qwen3_8b.1", "--commit", "4" * 40)
    assert done.exit_code == 130
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_command_leaves_no_folder_after_bad_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_roomy", lambda: str(tmp_path))
    assert invoke("--tiny", "--commit", "4" * 40, "--engine-arg", "a=b").exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_command_without_a_gpu_says_so() -> None:
    done = invoke("--commit", "5" * 40)
    assert done.exit_code == 2
    assert "use --tiny" in done.output


def test_engine_options_are_json() -> None:
    assert run.engine_options(["a=1", 'b={"c": [1]}']) == {"a": 1, "b": {"c": [1]}}
    with pytest.raises(InvalidInputError):
        run.engine_options(["=1"])


def test_list_names_every_work() -> None:
    done = invoke("--list")
    assert all(work.key in done.output for work in WORKS)
