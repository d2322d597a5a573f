"""Statistics on known input, merging of result files, provenance."""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
from pathlib import Path

import pytest

from benchmarks.common import answer, record
from benchmarks.common.rows import merge_into, merged, read_rows, require_mergeable
from benchmarks.common.stats import in_turns, paired_ratio
from consistent_kernels.errors import ConfigurationError, InvalidInputError


def test_paired_ratio_of_known_input() -> None:
    # Log ratios -0.1, 0, 0.1: mean 0, sample deviation 0.1, t(2) = 4.303.
    ours = [math.exp(x) for x in (-0.1, 0.0, 0.1)]
    ratio = paired_ratio([2 * x for x in ours], [2.0, 2.0, 2.0])
    half = 4.303 * 0.1 / math.sqrt(3)
    assert ratio.median == pytest.approx(1.0)
    assert ratio.low == pytest.approx(math.exp(-half))
    assert ratio.high == pytest.approx(math.exp(half))
    assert ratio.pairs == 3


def test_paired_ratio_of_equal_pairs_has_no_width() -> None:
    ratio = paired_ratio([3.0, 30.0, 0.3], [4.0, 40.0, 0.4])
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((0.75, 0.75, 0.75))


def test_paired_ratio_narrows_with_more_pairs() -> None:
    few = paired_ratio([1.0, 1.1] * 2, [1.0] * 4)
    many = paired_ratio([1.0, 1.1] * 40, [1.0] * 80)
    assert many.high - many.low < few.high - few.low


@pytest.mark.parametrize(
    ("ours", "stock"),
    [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, math.nan], [1.0, 1.0])],
)
def test_paired_ratio_rejects_what_has_no_ratio(ours: list[float], stock: list[float]) -> None:
    with pytest.raises(InvalidInputError):
        paired_ratio(ours, stock)


def test_in_turns_alternates_the_order() -> None:
    assert "".join(in_turns("AB", 5)) == "ABBAABBAAB"
    assert "".join(in_turns("ABC", 2)) == "ABCCBA"


def test_merge_replaces_by_key_and_keeps_the_rest() -> None:
    old = [{"work": "a", "variant": "x", "v": 1}, {"work": "b", "variant": "x", "v": 2}]
    new = [{"work": "b", "variant": "x", "v": 3}, {"work": "b", "variant": "y", "v": 4}]
    assert [row["v"] for row in merged(old, new, ("work", "variant"))] == [1, 3, 4]


def test_merge_takes_an_absent_key_field_as_none() -> None:
    assert merged([{"work": "a", "v": 1}], [{"work": "a", "v": 2}], ("work", "variant")) == [
        {"work": "a", "v": 2}
    ]


def test_merge_into_a_file_in_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.json"
    merge_into(path, [{"work": "a", "v": 1}], ("work",))
    merge_into(path, [{"work": "b", "v": 2}], ("work",))
    merge_into(path, [{"work": "a", "v": 3}], ("work",))
    assert json.loads(path.read_text()) == [{"work": "a", "v": 3}, {"work": "b", "v": 2}]
    assert [p.name for p in path.parent.iterdir()] == ["rows.json"]


@pytest.mark.parametrize("text", ["{}", "[1]", "not json"])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError):
        merge_into(path, [{"work": "a"}], ("work",))
    assert path.read_text() == text


def test_merges_side_by_side_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    names = [str(index) for index in range(48)]
    merging = [
        threading.Thread(target=merge_into, args=(path, [{"work": name}], ("work",)))
        for name in names
    ]
    for thread in merging:
        thread.start()
    for thread in merging:
        thread.join()
    assert sorted(row["work"] for row in read_rows(path)) == sorted(names)


def test_a_file_that_rows_can_go_into_is_taken(tmp_path: Path) -> None:
    there = tmp_path / "rows.json"
    merge_into(there, [{"work": "a", "hardware": "NVIDIA H200"}], ("work",))
    require_mergeable([there, tmp_path / "new" / "rows.json"], "NVIDIA H200")
    assert (tmp_path / "new").is_dir()


def test_what_rows_cannot_go_into_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "rows.json"
    merge_into(there, [{"work": "a", "hardware": "NVIDIA H200"}], ("work",))
    with pytest.raises(ConfigurationError, match="rows of NVIDIA H200, this is NVIDIA H100"):
        require_mergeable([there], "NVIDIA H100")
    with pytest.raises(ConfigurationError, match="named twice"):
        require_mergeable([there, tmp_path / "rows.json"], "NVIDIA H200")
    with pytest.raises(InvalidInputError, match="a file that can be read"):
        require_mergeable([tmp_path], "NVIDIA H200")
    with pytest.raises(ConfigurationError, match=r"rows\.json"):
        require_mergeable([there / "below.json"], "NVIDIA H200")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigurationError, match="cannot be written to"):
        require_mergeable([there], "NVIDIA H200")


def test_rows_of_an_absent_file() -> None:
    assert read_rows(Path("no/such/file.json")) == []


def test_provenance_names_machine_versions_and_commit() -> None:
    source = record.provenance("abc")
    assert source.commit == "abc"
    assert source.hardware
    assert "torch" in source.versions


def test_provenance_without_git_asks_for_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: str) -> str:
        raise subprocess.CalledProcessError(128, arguments)

    monkeypatch.setattr(record, "_git", fail)
    with pytest.raises(ConfigurationError, match="give --commit"):
        record.provenance()


@pytest.mark.parametrize(
    ("changes", "suffix"),
    [
        ("", ""),
        (" M train_bridge/hf.py", "-dirty"),
        (" M benchmarks/results/ops_h200.json", ""),
    ],
)
def test_a_changed_tree_is_named_dirty(
    monkeypatch: pytest.MonkeyPatch, changes: str, suffix: str
) -> None:
    monkeypatch.setattr(record, "_git", lambda *a: "f" * 40 if a[0] == "rev-parse" else changes)
    assert record.provenance().commit == "f" * 40 + suffix


def test_an_answer_says_where_it_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doc = "Do they differ?\n\nMore."
    args = answer.parser(doc).parse_args(["--out", str(tmp_path / "a.json"), "--commit", "abc"])
    answer.publish(answer.start(doc, args) | {"rows": [1, 2]}, args)
    found = json.loads((tmp_path / "a.json").read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert (found["question"], found["commit"], found["rows"]) == ("Do they differ?", "abc", [1, 2])
    assert {"hardware", "versions"} <= found.keys()
