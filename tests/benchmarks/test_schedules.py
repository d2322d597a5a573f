"""The sweeps of schedules on a CPU: names and constants exist, other bits and failures are seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.ops.case import Setting
from benchmarks.schedules import constants, gather, run, top_k
from benchmarks.schedules.group import Group
from consistent_kernels.sparse_topk import sparse_topk
from consistent_kernels.sparse_topk.spec import SHORT_THREADS, SHORT_VECTORS

SMALL = Setting("cpu", small=True)


def select(scores: Any, starts: Any, ends: Any, k: int, tickets: Any, shape: Any) -> torch.Tensor:
    """The CUDA program's bits, which the reference has as well."""
    return sparse_topk(scores, starts, ends, k, impl="reference")


def made_up(**fields: Any) -> Group:
    variants = {"a": lambda: torch.zeros(2), "b": lambda: torch.zeros(2)}
    given: dict[str, Any] = {"variants": variants, "chosen": "a", "stock": {}}
    return Group(op="made_up", shape="M=2", **(given | fields))


@pytest.mark.parametrize("name", run.SWEEPS)
def test_a_sweep_runs_and_its_rows_say_what_was_chosen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_k, "sparse_topk_select", select)
    out = tmp_path / "rows.json"
    options = ["--device", "cpu", "--small", "--repeats", "2", "--commit", "1" * 40]
    done = CliRunner().invoke(run.app, [*options, "--only", name, "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())
    shapes = {(row["op"], row["shape"]) for row in rows}
    assert sum(row["chosen"] for row in rows) == len(shapes)
    assert all(row["us"] > 0 and row["same_bits"] is not False for row in rows)
    assert {"hardware", "versions", "commit"} <= set(rows[0])


def test_constants_are_set_for_the_call_alone() -> None:
    (group, *_) = gather.gathers(SMALL)
    seen = []
    call = constants.with_values
    before = gather.kv_cache.GATHER_WARPS
    call(
        gather.kv_cache,
        {"GATHER_WARPS": 99},
        lambda: seen.append(gather.kv_cache.GATHER_WARPS),
    )
    assert seen == [99]
    assert before == gather.kv_cache.GATHER_WARPS
    assert group.chosen in group.variants


def test_every_shape_of_top_k_holds_its_rows() -> None:
    for (columns, _), shapes in top_k.SHAPES.items():
        for shape in shapes:
            held = 4 * shape.blocks * shape.vectors * shape.threads
            assert shape.vectors == 0 or held >= columns
            if shape.short:
                assert shape.vectors in SHORT_VECTORS
                assert shape.threads in SHORT_THREADS


def test_control_other_bits_are_told() -> None:
    group = made_up(variants={"a": lambda: torch.zeros(2), "b": lambda: -torch.zeros(2)})
    rows = run.measure(group, SMALL, 2)
    assert [row["same_bits"] for row in rows] == [True, False]
    wrong = made_up(expected=torch.ones(1))
    assert [row["same_bits"] for row in run.measure(wrong, SMALL, 2)] == [False, False]


def test_control_rows_that_follow_their_number_are_told() -> None:
    result = torch.arange(16.0).view(8, 2)

    def rows(part: slice) -> torch.Tensor:
        return result[part] * (-1 if part.stop - part.start == 3 else 1)

    variants = {"a": lambda: result, "b": lambda: result}
    given = {"a": lambda part: result[part], "b": rows}
    group = made_up(variants=variants, rows=given, counts=[1, 3])
    found = run.measure(group, SMALL, 2)
    assert [row["same_bits"] for row in found] == [True, True]
    assert [row["same_rows"] for row in found] == [True, False]
    assert "same_rows" not in run.measure(made_up(), SMALL, 2)[0]


def test_a_variant_that_fails_does_not_stop_the_others() -> None:
    def fails() -> None:
        raise RuntimeError("does not compile")

    rows = run.measure(made_up(variants={"a": lambda: torch.zeros(2), "b": fails}), SMALL, 2)
    assert rows[0]["us"] > 0
    assert rows[1]["us"] is None
    assert "does not compile" in rows[1]["error"]


def test_the_command_rejects_bad_arguments() -> None:
    done = CliRunner().invoke(run.app, ["--only", "nonsense", "--device", "cpu"])
    assert done.exit_code == 2
    assert "nonsense" in done.output
