"""The README's tables: up to date with the JSON, empty without it, markers kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.rollout.works import WORKS
from benchmarks.table import run
from consistent_kernels.errors import InvalidInputError

SOURCE = {
    "hardware": "NVIDIA H200",
    "versions": {"vllm": "0.25.1", "torch": "2.11.0"},
    "commit": "0123456789abcdef",
}


def rollout_row(work: str, variant: str = "consistent", **fields: Any) -> dict[str, Any]:
    row = {
        "work": work,
        "variant": variant,
        "ratio_to_stock": 0.991,
        "ratio_low": 0.987,
        "ratio_high": 0.995,
        "ours": 13246.3,
        "stock": 13366.6,
        "unit": "tokens/s",
        "mismatched_tokens": 0,
        "compared_tokens": 16384,
    }
    return row | SOURCE | fields


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).write_text(json.dumps(rows))


def test_readme_is_up_to_date_with_the_results() -> None:
    text = run.README.read_text()
    assert text == run.replaced(text, run.block(run.RESULTS)), "run python -m benchmarks.table"


def test_no_result_gives_no_table(tmp_path: Path) -> None:
    assert run.block(tmp_path) == ""


def test_rollout_rows_stand_in_the_order_of_the_works(tmp_path: Path) -> None:
    rows = [rollout_row(WORKS[2].name), rollout_row(WORKS[0].name, "triton", ratio_to_stock=0.8)]
    write(tmp_path, "rollout_h200.json", rows)
    lines = run.block(tmp_path).splitlines()
    assert lines[0].startswith("| rollout |")
    assert WORKS[0].name in lines[2]
    assert "| 0.800 |  |" in lines[2], "an aim is ours alone"
    assert WORKS[2].name in lines[3]
    assert "| 0.991 | at least 0.95: met |" in lines[3]
    assert "| 13,246 tokens/s | 13,367 tokens/s | 0 of 16,384 |" in lines[3]
    assert lines[-1] == "NVIDIA H200, vllm 0.25.1, torch 2.11.0, commit 0123456789."


@pytest.mark.parametrize(
    ("work", "ratio", "low", "high", "text"),
    [
        (0, 0.98, 0.96, 1.2, "at least 0.98: met"),
        (0, 0.98, 0.959, 1.2, "at least 0.98: by the median alone"),
        (0, 0.979, 0.97, 1.2, "at least 0.98: not met"),
        (3, 1.05, 0.9, 1.07, "at most 1.05: met"),
        (3, 1.05, 0.9, 1.071, "at most 1.05: by the median alone"),
        (3, 1.051, 0.9, 1.06, "at most 1.05: not met"),
    ],
)
def test_an_aim_says_whether_it_is_met(
    tmp_path: Path, work: int, ratio: float, low: float, high: float, text: str
) -> None:
    fields = {"ratio_to_stock": ratio, "ratio_low": low, "ratio_high": high}
    write(tmp_path, "rollout_h200.json", [rollout_row(WORKS[work].name, **fields)])
    assert f"| {text} |" in run.block(tmp_path)


def test_further_engine_arguments_show(tmp_path: Path) -> None:
    rows = [rollout_row("w", engine_args={"max_num_batched_tokens": 8192})]
    write(tmp_path, "rollout_h200.json", rows)
    assert "| w, max_num_batched_tokens=8192 | consistent |" in run.block(tmp_path)


def test_commits_of_one_machine_stand_together(tmp_path: Path) -> None:
    rows = [rollout_row(name, commit=name * 12) for name in "aba"]
    write(tmp_path, "rollout_h200.json", [*rows, rollout_row("c", hardware="NVIDIA B200")])
    line = run.block(tmp_path).splitlines()[-1]
    first = f"NVIDIA H200, vllm 0.25.1, torch 2.11.0, commits {'a' * 10}, {'b' * 10}; "
    assert line == f"{first}NVIDIA B200, vllm 0.25.1, torch 2.11.0, commit 0123456789."


def test_a_changed_tree_shows(tmp_path: Path) -> None:
    write(tmp_path, "rollout_h200.json", [rollout_row("w", commit="0123456789abcdef-dirty")])
    assert run.block(tmp_path).splitlines()[-1].endswith("commit 0123456789-dirty.")


def test_training_and_ops_follow(tmp_path: Path) -> None:
    train = rollout_row("Qwen3-8B shape, 9 layers") | {
        "stock_logprobs": "chunked", "ours": 2.0, "stock": 1.9, "peak_memory_ratio": 1.02
    }  # fmt: skip
    op = {"op": "linear", "impl": "triton", "relations_ok": True, "shape": "M=1"} | SOURCE
    write(tmp_path, "train_h200.json", [train])
    write(
        tmp_path,
        "ops_h200.json",
        [
            op | {"ratio_to_stock": 1.0},
            op | {"ratio_to_stock": 1.25, "shape": "M=64"},
            op | {"op": "refused", "relations_ok": False, "ratio_to_stock": None},
            op | {"op": "without_stock", "ratio_to_stock": None},
        ],
    )
    text = run.block(tmp_path)
    assert "chunked logits | 0.991 | 0.987 to 0.995 | 2.00 s | 1.90 s | 1.020 |" in text
    assert "| linear | triton | 2 | 1.00 | 1.25 | M=64 |" in text
    assert "refused" not in text
    assert "without_stock" not in text


def test_only_the_text_between_the_markers_changes() -> None:
    text = f"before\n{run.BEGIN}\nold\n{run.END}\nafter\n"
    assert run.replaced(text, "new\n") == f"before\n{run.BEGIN}\nnew\n\n{run.END}\nafter\n"
    assert run.replaced(text, "") == f"before\n{run.BEGIN}\n{run.END}\nafter\n"


@pytest.mark.parametrize(
    "text", ["no markers", run.BEGIN, f"{run.END}\n{run.BEGIN}", f"{run.BEGIN}{run.END}{run.BEGIN}"]
)
def test_a_readme_without_the_markers_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="one <!-- benchmarks: begin -->"):
        run.replaced(text, "")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(run.app, [str(argument) for argument in arguments])


def test_command_writes_and_checks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n{run.BEGIN}\n{run.END}\n")
    write(tmp_path, "rollout_h200.json", [rollout_row(WORKS[0].name)])
    arguments = ("--results", tmp_path, "--readme", readme)
    assert invoke(*arguments, "--check").exit_code == 1, "control: it is out of date"
    assert invoke(*arguments).exit_code == 0
    assert WORKS[0].name in readme.read_text()
    assert invoke(*arguments, "--check").exit_code == 0


def test_command_rejects_a_broken_result_file(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"{run.BEGIN}\n{run.END}\n")
    (tmp_path / "rollout_h200.json").write_text("{}")
    done = invoke("--results", tmp_path, "--readme", readme)
    assert done.exit_code == 2
    assert "a JSON list of objects" in done.output
