"""The ops harness: every case file on a CPU, refusal, interleaving, bad arguments."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.common.record import Provenance
from benchmarks.ops import run
from benchmarks.ops.case import Case, Setting, case_modules
from benchmarks.ops.relations import check_rows
from consistent_kernels.errors import InvalidInputError, NumericsError, UnsupportedError
from consistent_kernels.testing import hazard_activations, split_k_linear

DENSE = {
    "attention",
    "embedding",
    "linear",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "token_logprobs",
}
EXPERTS = {"experts", "fp8_experts", "fp8_linear", "quantization", "router"}
OPS = [module.OP for module in case_modules()]
SOURCE = Provenance("a test", {"torch": torch.__version__}, "0" * 40)
SMALL = Setting("cpu", small=True)


def nothing() -> None:
    return None


def fails() -> None:
    raise AssertionError("row 3 differs")


def module(*cases: Case, error: Exception | None = None) -> Any:
    def generate(setting: Setting) -> Iterator[Case]:
        yield from cases
        if error is not None:
            raise error

    return types.SimpleNamespace(OP="made_up", cases=generate)


def case(relations: Callable[[], None] = nothing, **fields: Any) -> Case:
    given: dict[str, Any] = {
        "op": "made_up", "shape": "M=1", "impl": "reference", "ours": nothing, "stock": nothing
    }  # fmt: skip
    return Case(**(given | fields), relations=relations)


def measured(*modules: Any) -> run.Outcome:
    return run.measure(list(modules), SMALL, 2, SOURCE, lambda text: None)


def test_every_op_has_a_case_file() -> None:
    assert set(OPS) >= DENSE | EXPERTS


@pytest.mark.parametrize("op", sorted(EXPERTS))
def test_control_a_case_file_refuses_an_op_that_follows_the_batch(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cases,) = case_modules([op])
    names = ("quantize_rows", "quantize_weight") if op == "quantization" else (op,)
    for name in names:
        monkeypatch.setattr(cases, name, follows_the_batch(getattr(cases, name)))
    outcome = measured(cases)
    assert outcome.failed == {}
    assert outcome.rows
    assert outcome.refused == outcome.rows
    for row in outcome.rows:
        assert row["ours_us"] is None
        assert "relation fails" in row["reason"]


def follows_the_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, one bit of its last row wrong for odd numbers of rows and for 128."""

    def faulty(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        result = function(x, *args, **options)
        first = result[0] if isinstance(result, tuple) else result
        if x.shape[0] % 2 or x.shape[0] == 128:
            first.view(torch.uint8)[-1, 0] ^= 1
        return result

    return faulty


@pytest.mark.parametrize("op", OPS)
def test_case_file_holds_its_relations_and_is_timed(op: str) -> None:
    outcome = measured(*case_modules([op]))
    assert outcome.failed == {}
    assert outcome.rows
    for row in outcome.rows:
        assert row["relations_ok"], row["reason"]
        assert row["ours_us"] > 0
        assert row["stock_us"] is None or row["stock_us"] > 0
        assert row["stock_us"] or row["reason"]
    names = [tuple(row[field] for field in run.KEY) for row in outcome.rows]
    assert len(set(names)) == len(names), "two cases would share one row"


def test_a_case_whose_relation_fails_gets_no_time() -> None:
    called = []
    outcome = measured(
        module(case(fails, ours=lambda: called.append(1)), case(shape="M=2", impl="reference"))
    )
    refused, fine = outcome.rows
    assert (refused["relations_ok"], refused["ours_us"], refused["ratio_to_stock"]) == (
        False, None, None
    )  # fmt: skip
    assert "row 3 differs" in refused["reason"]
    assert called == [], "a refused case must not be timed"
    assert fine["relations_ok"]
    assert outcome.refused == [refused]


def test_a_probe_that_finds_a_difference_refuses_the_case() -> None:
    def probe() -> None:
        raise NumericsError("rows follow M")

    outcome = measured(module(case(probe), case(shape="M=2")))
    assert outcome.failed == {}
    assert [row["relations_ok"] for row in outcome.rows] == [False, True]
    assert "rows follow M" in outcome.rows[0]["reason"]


def test_one_relation_given_twice_runs_once() -> None:
    calls = []

    def relation() -> None:
        calls.append(1)

    measured(module(case(relation), case(relation, shape="M=2")))
    assert len(calls) == 1


def test_a_broken_case_file_does_not_stop_the_others() -> None:
    outcome = measured(module(case(), error=RuntimeError("no kernel")), module(case(shape="M=9")))
    assert [row["shape"] for row in outcome.rows] == ["M=1", "M=9"]
    assert "no kernel" in outcome.failed["made_up"]


def test_a_case_without_stock_needs_a_reason() -> None:
    with pytest.raises(InvalidInputError, match="reason must be given"):
        case(stock=None)
    outcome = measured(module(case(stock=None, reason="stock fuses it")))
    assert outcome.rows[0]["stock_us"] is None
    assert outcome.rows[0]["reason"] == "stock fuses it"


def test_rows_carry_what_a_result_must_record() -> None:
    row = measured(module(case())).rows[0]
    fields = {
        "op", "shape", "ours_us", "stock_us", "ratio_to_stock", "relations_ok", "hardware",
        "versions", "commit", "reason",
    }  # fmt: skip
    assert fields <= set(row)


def test_check_rows_is_run_to_run_and_batch() -> None:
    x = hazard_activations((40, 64), seed=1)
    check_rows(lambda rows: (x[rows] * 2, x[rows] + 1), len(x))


def test_control_check_rows_finds_a_split_that_follows_the_batch() -> None:
    # fp32: a rounding to bf16 would hide nearly all of it.
    x = hazard_activations((40, 512), seed=1, dtype=torch.float32)
    weight = hazard_activations((64, 512), seed=2, dtype=torch.float32)

    def follows_the_batch(rows: slice) -> torch.Tensor:
        part = x[rows]
        return split_k_linear(part, weight, 4 if len(part) < 9 else 1)

    with pytest.raises(AssertionError, match="rows from"):
        check_rows(follows_the_batch, len(x))


def test_control_check_rows_finds_a_run_that_does_not_repeat() -> None:
    x, calls = hazard_activations((8, 16), seed=1), []

    def drifts(rows: slice) -> torch.Tensor:
        calls.append(1)
        return x[rows] * len(calls)

    with pytest.raises(AssertionError, match="a second run"):
        check_rows(drifts, len(x))


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(run.app, list(arguments))


def test_command_merges_rows_and_exits_with_0(tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    arguments = ["--op", "linear", "--device", "cpu", "--small", "--repeats", "2"]
    for commit in ("1" * 40, "2" * 40):
        done = invoke(*arguments, "--out", str(out), "--commit", commit)
        assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())
    assert {row["commit"] for row in rows} == {"2" * 40}, "the second run replaces the first"


def test_command_exits_with_1_on_a_refused_op(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "case_modules", lambda only: [module(case(fails))])
    out = tmp_path / "ops.json"
    done = invoke("--device", "cpu", "--small", "--out", str(out), "--commit", "3" * 40)
    assert done.exit_code == 1
    assert "row 3 differs" in done.output
    assert json.loads(out.read_text())[0]["ours_us"] is None


def test_command_exits_with_3_on_a_broken_op(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = module(error=RuntimeError("no kernel"))
    monkeypatch.setattr(run, "case_modules", lambda only: [broken])
    done = invoke("--device", "cpu", "--small", "--commit", "3" * 40)
    assert done.exit_code == 3
    assert "no kernel" in done.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--op", "nonsense", "--device", "cpu"], "op 'nonsense' is not supported"),
        (["--device", "tpu"], "use cuda or cpu"),
        (["--repeats", "1", "--device", "cpu"], "greater than or equal to 2"),
    ],
)
def test_command_rejects_bad_arguments(arguments: list[str], text: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert text in done.output


def test_an_unknown_op_names_those_there_are() -> None:
    with pytest.raises(UnsupportedError, match="linear"):
        case_modules(["nonsense"])
