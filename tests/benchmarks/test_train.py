"""The training benchmark: tiny on a CPU, refusal, layers that fit, bad arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.common.clock import Clock
from benchmarks.rollout.models import TINY_MODELS
from benchmarks.train import run
from benchmarks.train.parity import Parity, check
from benchmarks.train.run import Setting
from benchmarks.train.step import (
    STOCK,
    Pair,
    Step,
    build,
    make_batch,
    our_logprobs,
    stock_chunked_logprobs,
    stock_full_logprobs,
    timed_step,
)

SHAPE = TINY_MODELS["qwen3_8b"]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build(SHAPE, 1, "cpu", recompute=False)


def test_both_models_share_their_parameters(pair: Pair) -> None:
    ours, stock = dict(pair.ours.named_parameters()), dict(pair.stock.named_parameters())
    assert ours.keys() == stock.keys()
    assert all(ours[name] is stock[name] for name in ours)
    assert type(pair.ours) is not type(pair.stock)


def test_all_sides_score_the_same_tokens(pair: Pair) -> None:
    batch = make_batch(SHAPE, 2, 12, "cpu")
    with torch.no_grad():
        scores = [
            score(model, batch)
            for score, model in (
                (our_logprobs, pair.ours),
                (stock_full_logprobs, pair.stock),
                (stock_chunked_logprobs, pair.stock),
            )
        ]
    assert all(score.shape == (2, 11) for score in scores)
    # The log-probs of random tokens lie tens below 0; bf16 logits of that size are wrong by 0.25.
    for score in scores[1:]:
        assert (score - scores[0]).abs().max().item() < 2.0


@pytest.mark.parametrize("name", STOCK)
def test_a_step_has_gradients_and_leaves_none(name: str, pair: Pair) -> None:
    batch = make_batch(SHAPE, 2, 8, "cpu")
    seen: list[bool] = []
    weight = pair.stock.model.layers[0].mlp.down_proj.weight
    hook = weight.register_hook(lambda grad: seen.append(bool((grad != 0).any())))
    step = timed_step(STOCK[name], pair.stock, batch, pair)
    hook.remove()
    assert seen == [True]
    assert step.seconds > 0
    assert weight.grad is None


def test_parity_holds_for_the_bridged_model(pair: Pair) -> None:
    found = check(pair.ours, make_batch(SHAPE, 3, 20, "cpu"))
    assert found.mismatched == 0
    assert found.compared == 3 * 19
    assert 0.3 < found.mean_entropy < 3, "flat logits hide mismatches"
    assert set(found.runs) == {"a second run", "packed", "one sequence at a time", "with gradients"}


def test_control_parity_finds_weights_that_change_between_runs(pair: Pair) -> None:
    batch = make_batch(SHAPE, 2, 8, "cpu")
    weight = pair.ours.lm_head.weight
    original, calls = weight.detach().clone(), []

    def drift(module: Any, arguments: Any) -> None:
        calls.append(1)
        with torch.no_grad():
            weight.mul_(1.01)

    hook = pair.ours.model.register_forward_pre_hook(drift)
    try:
        assert check(pair.ours, batch).mismatched > 0
    finally:
        hook.remove()
        with torch.no_grad():
            weight.copy_(original)
    assert calls


def setting(**fields: Any) -> Setting:
    given: dict[str, Any] = {
        "shape": SHAPE, "device": "cpu", "sequences": 2, "length": 8, "pairs": 2, "warmups": 0,
        "stock": ("chunked", "full"), "recompute": False, "layers": 1,
    }  # fmt: skip
    return Setting(**(given | fields))


def test_rows_hold_time_and_memory_against_each_stock_trainer() -> None:
    steps = {
        "ours": [Step(2.0, 105), Step(2.2, 104)],
        "chunked": [Step(1.0, 100), Step(1.1, 99)],
        "full": [Step(4.0, 210), Step(4.4, 200)],
    }
    rows = run.rows_of(steps, 3, Parity(100, 0, {}, -46.0, 1.5), setting())
    by_kind = {row["stock_logprobs"]: row for row in rows}
    assert by_kind["chunked"]["ratio_to_stock"] == pytest.approx(2.0)
    assert by_kind["chunked"]["peak_memory_ratio"] == pytest.approx(1.05)
    assert by_kind["full"]["ratio_to_stock"] == pytest.approx(0.5)
    assert by_kind["full"]["peak_memory_ratio"] == pytest.approx(0.5)
    assert by_kind["full"]["layers"] == 3
    assert (by_kind["full"]["mismatched_tokens"], by_kind["full"]["compared_tokens"]) == (0, 100)
    assert (by_kind["full"]["mean_logprob"], by_kind["full"]["mean_entropy"]) == (-46.0, 1.5)


def test_stock_that_does_not_fit_is_left_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(model: Any, batch: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setitem(STOCK, "full", too_large)
    batch = make_batch(SHAPE, 2, 8, "cpu")
    steps, missing = run.run_rounds(pair, batch, setting(), Clock(lambda text: None))
    assert missing == ["full"]
    assert {name: len(side) for name, side in steps.items()} == {"ours": 2, "chunked": 2}


def test_no_stock_that_fits_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(model: Any, batch: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setitem(STOCK, "full", too_large)
    out = tmp_path / "train.json"
    base = ("--tiny", "--layers", 1, "--pairs", 2, "--commit", "7" * 40, "--out", out)
    done = invoke(*base, "--stock", "full")
    assert done.exit_code == 3, done.output
    assert "no stock trainer fits into memory; no speed is reported" in done.output
    assert not out.exists()
    assert invoke(*base).exit_code == 0, "control: the other one fits"
    assert [row["stock_logprobs"] for row in json.loads(out.read_text())] == ["chunked"]


def test_rows_are_kept_as_soon_as_there_are_enough_pairs() -> None:
    kept: list[list[int]] = []
    run.measure(
        setting(pairs=7, stock=("chunked",), warmups=1),
        Clock(lambda text: None),
        lambda rows: kept.append([row["pairs"] for row in rows]),
    )
    assert kept == [[5], [6], [7]]


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(run.app, [str(argument) for argument in arguments])


def test_command_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "train.json"
    base = ("--tiny", "--layers", 1, "--pairs", 2, "--warmups", 0, "--commit", "7" * 40)
    done = invoke(*base, "--recompute", "--stock", "chunked", "--out", out)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(out.read_text())
    assert "recomputed activations" in row["work"]
    assert row["ratio_to_stock"] > 0
    assert row["mismatched_tokens"] == 0
    assert row["commit"] == "7" * 40


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Parity(100, 3, {"packed": 3}, -46.0, 1.0), "3 of 100 tokens differ"),
        (Parity(100, 0, {"packed": 0}, -12.0, 3.0), "mean entropy 3.00 is not below 3.0"),
        (Parity(100, 0, {"packed": 0}, float("nan"), float("nan")), "mean entropy nan"),
    ],
)
def test_command_exits_with_1_and_writes_nothing(
    found: Parity, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "check", lambda model, batch: found)
    out = tmp_path / "train.json"
    done = invoke("--tiny", "--layers", 1, "--pairs", 2, "--commit", "7" * 40, "--out", out)
    assert done.exit_code == 1
    assert text in done.output
    assert "no speed is reported" in done.output
    assert not out.exists()


def test_command_looks_at_its_file_before_it_starts(tmp_path: Path) -> None:
    out = tmp_path / "train.json"
    out.write_text('[{"hardware": "another machine"}]')
    done = invoke("--tiny", "--layers", 1, "--pairs", 2, "--commit", "7" * 40, "--out", out)
    assert done.exit_code == 2
    assert "rows of another machine" in " ".join(done.output.split())


def test_command_that_breaks_does_not_end_as_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any, batch: Any) -> Parity:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(run, "check", broken)
    done = invoke("--tiny", "--layers", 1, "--pairs", 2, "--commit", "7" * 40)
    assert done.exit_code == 3


def test_command_writes_no_ratio_of_fewer_than_16384_tokens(tmp_path: Path) -> None:
    few = ("--sequences", 4, "--length", 4096)
    done = invoke(*few, "--commit", "7" * 40, "--out", tmp_path / "train.json")
    assert done.exit_code == 2
    assert "16384 or more where rows are written, got 16380" in " ".join(done.output.split())


def test_command_writes_no_ratio_of_fewer_than_five_pairs(tmp_path: Path) -> None:
    done = invoke("--pairs", 4, "--commit", "7" * 40, "--out", tmp_path / "train.json")
    assert done.exit_code == 2
    assert "5 or more where rows are written" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--stock", "fused"), "'fused' is not supported; supported: chunked, full"),
        (("--pairs", 1), "greater than or equal to 2"),
        (("--layers", 0), "greater than or equal to 1"),
    ],
)
def test_command_rejects_bad_arguments(arguments: tuple[object, ...], text: str) -> None:
    done = invoke("--tiny", "--commit", "7" * 40, *arguments)
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())
