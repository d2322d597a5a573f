"""What the documents say of the H200's rollouts stands in their rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.rows import read_rows
from benchmarks.rollout.works import WORKS

ROOT = Path(__file__).resolve().parents[2]
ROWS = read_rows(ROOT / "benchmarks" / "results" / "rollout_h200.json")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()
NAMES = {"qwen3_0_6b": "0.6B", "smollm2": "SmolLM2", "qwen3_8b": "8B"}
"""Models to what "Not measured yet" calls them."""


def flat(text: str) -> str:
    return " ".join(text.split())


def told_rounds(text: str) -> tuple[list[str], str]:
    """The range of ratios that rounds in turns are said to have, and the one beyond it."""
    low, high, beyond = re.search(
        r"give (\d\.\d\d) to (\d\.\d\d) in all rounds but one, [^:]*: (\d\.\d\d)", flat(text)
    ).groups()
    return [low, high], beyond


def rounds_in_turns(rows: list[dict[str, Any]]) -> list[float]:
    return sorted(
        ours / stock
        for row in rows
        if row.get("slice_steps") and row["variant"] == "consistent"
        for ours, stock in row["rounds"]
    )


def said_not_run(text: str) -> list[str]:
    """The works of which a sentence says that they have not been run."""
    sentences = re.split(r"(?<=[.;])\s", flat(text))
    return [
        work
        for sentence in sentences
        if "not been run" in sentence
        for work in re.findall(r"--work ([a-z0-9_.]+)", sentence)
    ]


def with_rows(work: str, rows: list[dict[str, Any]]) -> bool:
    names = {one.name for one in WORKS if work in (one.key, one.model)}
    return any(row["work"] in names for row in rows)


def unnamed(text: str, rows: list[dict[str, Any]]) -> list[str]:
    """Variants whose rows are of whole rollouts, and that "Not measured yet" leaves out."""
    section = flat(text.partition("## Not measured yet")[2])
    found = set()
    for row in rows:
        model = next(work.model for work in WORKS if work.name == row["work"])
        if model not in NAMES or row.get("slice_steps") or row["lower_is_better"]:
            continue
        named = rf"`{row['variant']}` beside [^,;]*{NAMES[model]}|all of [^,;]*{NAMES[model]}"
        if not re.search(named, section):
            found.add(f"{row['variant']} beside {NAMES[model]}")
    return sorted(found)


def test_rounds_in_turns_lie_where_the_document_says() -> None:
    *within, last = rounds_in_turns(ROWS)
    ends, beyond = told_rounds(PERFORMANCE)
    assert [f"{within[0]:.2f}", f"{within[-1]:.2f}"] == ends
    assert f"{last:.2f}" == beyond


@pytest.mark.parametrize("name", ["README.md", "docs/numerics.md", "docs/performance.md"])
def test_no_work_with_rows_is_said_not_to_have_run(name: str) -> None:
    said = said_not_run((ROOT / name).read_text())
    assert [work for work in said if with_rows(work, ROWS)] == []


def test_rows_of_whole_rollouts_are_named_as_such() -> None:
    assert unnamed(PERFORMANCE, ROWS) == []


def test_control_false_sentences_are_found() -> None:
    said = said_not_run("The shape (`python -m x --work qwen3_30b_a3b_fp8`) has not\nbeen run.")
    assert said == ["qwen3_30b_a3b_fp8"]
    assert with_rows(said[0], ROWS)
    old = "## Not measured yet\n\n`triton` beside 0.6B and SmolLM2, all of 8B."
    assert unnamed(old, ROWS) == ["batch_invariant beside 0.6B"]
