"""The rollout benchmark without engines: order, refusals, rows, works, memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engines import LOGPROB, NEXT, Fake, dies_after, use_fakes

from benchmarks.common.clock import Clock
from benchmarks.rollout.models import Checkpoint
from benchmarks.rollout.process import ProcessError
from benchmarks.rollout.prompts import RandomPrompts
from benchmarks.rollout.samples import Comparison, Sample, compare, enough
from benchmarks.rollout.session import ModelSession, Options, ParityError, require
from benchmarks.rollout.variants import STOCK, VARIANTS, variants
from benchmarks.rollout.works import WORKS, chosen, tiny

PROMPTS = RandomPrompts(1280)
MODEL = Checkpoint(Path("somewhere"), PROMPTS, weight_bytes=1000, kv_bytes=64)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)


def options(*names: str, **fields: Any) -> Options:
    given: dict[str, Any] = {
        "variants": variants(list(names) or ["consistent"], with_stock=True),
        "pairs": 3,
        "peer_pairs": 3,
        "warmups": 1,
        "parity_tokens": 8,
        "device": "cpu",
        "engine_args": {},
        "packed_tokens": 64,
        "environment": {},
        "logs": Path("logs"),
        "profile_steps": 0,
        "cache_state": "cold",
    }
    return Options(**(given | fields))


def finished(
    *keys: str, told: Options | None = None, keep: Any = lambda result: None
) -> ModelSession:
    """Run a session of tiny works on fakes."""
    works = [tiny(work) for work in chosen(keys or ("qwen3_0_6b.256",))]
    return run_through(ModelSession(works, told or options(), Clock(lambda text: None)), keep)


def run_through(made: ModelSession, keep: Any = lambda result: None) -> ModelSession:
    made.launch()
    made.begin(MODEL)
    made.settle()
    made.smoke()
    made.time()
    made.check(keep)
    made.close()
    return made


def test_rows_hold_what_the_table_needs() -> None:
    result = finished().result
    assert result.refusals == []
    (row,) = result.rows
    assert row["ratio_to_stock"] == row["ratio_low"] == row["ratio_high"] == pytest.approx(0.8)
    assert len(row["rounds"]) == row["pairs"]
    assert all(ours / stock == pytest.approx(0.8) for ours, stock in row["rounds"])
    assert (row["ours"], row["stock"], row["unit"], row["pairs"]) == (80.0, 100.0, "tokens/s", 3)
    assert (row["mismatched_tokens"], row["stock_mismatched_tokens"]) == (0, 0)
    assert (row["contract"], row["runner"]) == ("d1", "V2")
    assert (row["stock_environment"], row["engine_args"]) == ({"VLLM_OF": STOCK}, {})
    assert row["compared_tokens"] >= 8
    assert row["mean_logprob"] == pytest.approx(float(LOGPROB))
    assert row["start_seconds"] == {"ours": 30.0, "stock": 30.0, "cache": "cold"}


def test_engines_take_turns_forwards_and_backwards() -> None:
    finished(told=options("consistent", "batch_invariant", warmups=0))
    slices = [variant for variant, method in Fake.calls if method == "advance"]
    forwards = [STOCK, "consistent", "batch_invariant"]
    there, back = [*forwards, *forwards[::-1]], [*forwards[::-1], *forwards]
    assert slices == [*there, *back, *there]


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_one_differing_bit_refuses_the_speed(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if role == "engine":  # let the first samples pass, so that the last check is what refuses
        monkeypatch.setattr(ModelSession, "smoke", lambda self: None)
    Fake.faults[("consistent", role, "score")] = "one bit"
    result = finished().result
    assert result.rows == []
    (line,) = result.refusals
    assert "1 of 12 log-probs differ" in line
    assert f"{role} 1" in line
    assert f"first at request 1, token 5: sampled {LOGPROB.item()!r}" in line
    assert f"{role} {NEXT.item()!r}" in line
    assert "no speed is reported" in line


def test_differing_first_samples_stop_the_engine_before_it_is_timed() -> None:
    Fake.faults[("consistent", "engine", "score")] = "one bit"
    result = finished().result
    assert result.rows == []
    assert "nothing was timed" in result.refusals[0]
    assert [call for call in Fake.calls if call == ("consistent", "rollout")] == [
        ("consistent", "rollout")
    ]


@pytest.mark.parametrize("logprob", [-3.0, -np.inf, np.nan])
def test_flat_logits_refuse_the_speed(logprob: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN too, whose bits are equal on all sides."""
    monkeypatch.setattr(Fake, "logprob", np.float32(logprob))
    result = finished().result
    assert result.rows == []
    assert "too flat" in result.refusals[0]


GOOD = Comparison(16_384, -1.0, engine=0, trainer=0, mismatched=0, first=None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": 16_383}, "only 16383 of 16384 tokens were compared"),
        ({"trainer": None}, "no trainer scored the samples"),
        ({"mismatched": 1, "trainer": 1, "first": "request 0"}, "1 of 16384 log-probs differ"),
        ({"mean_logprob": -3.0}, "mean log-prob -3.00 is not above"),
        ({"mean_logprob": float("nan")}, "mean log-prob nan is not above"),
    ],
)
def test_each_condition_refuses_our_speed_and_no_peers(changes: dict[str, Any], text: str) -> None:
    require(GOOD, VARIANTS["consistent"], 16_384)
    found = dataclasses.replace(GOOD, **changes)
    for name in ("consistent", "triton"):
        with pytest.raises(ParityError, match=f"{text}.*no speed is reported"):
            require(found, VARIANTS[name], 16_384)
    require(found, VARIANTS["batch_invariant"], 16_384)


def test_a_peer_is_measured_with_its_mismatch() -> None:
    Fake.faults[("batch_invariant", "engine", "score")] = "one bit"
    rows = {
        row["variant"]: row
        for row in finished(told=options("consistent", "batch_invariant")).result.rows
    }
    assert rows["batch_invariant"]["mismatched_tokens"] == 1
    assert rows["batch_invariant"]["mismatched_trainer"] is None
    assert rows["consistent"]["mismatched_tokens"] == 0


def test_too_few_tokens_are_topped_up() -> None:
    told = options(parity_tokens=200)
    (row,) = finished("qwen3_0_6b.1", told=told).result.rows
    assert 200 <= row["compared_tokens"] < 212


def test_a_variant_that_does_not_start_is_left_out() -> None:
    Fake.faults[("batch_invariant", "engine", "start")] = ProcessError("no such backend")
    result = finished(told=options("consistent", "batch_invariant")).result
    assert [row["variant"] for row in result.rows] == ["consistent"]
    assert "no such backend" in result.broken[0]


def test_without_stock_nothing_is_measured() -> None:
    Fake.faults[(STOCK, "engine", "start")] = ProcessError("out of memory")
    result = finished().result
    assert result.rows == []
    assert "out of memory" in result.broken[0]
    assert ("consistent", "rollout") not in Fake.calls


def test_what_was_timed_before_stock_died_is_kept() -> None:
    dies_after(STOCK, "begin", 4)
    result = finished("qwen3_8b.256", "qwen3_8b.1").result
    assert [row["work"] for row in result.rows] == [tiny(chosen(["qwen3_8b.256"])[0]).name]
    assert len(result.broken) == 1


def test_a_work_checked_before_the_engine_died_is_kept() -> None:
    """The engine samples the smoke test and dies where the second work's tokens are topped up."""
    dies_after("consistent", "rollout", 1)
    kept: list[int] = []
    told = options(parity_tokens=30)
    result = finished(
        "qwen3_8b.256", "qwen3_8b.1", told=told, keep=lambda r: kept.append(len(r.rows))
    ).result
    assert [row["work"] for row in result.rows] == [tiny(chosen(["qwen3_8b.256"])[0]).name]
    assert kept == [1]
    assert "died" in result.broken[0]


def test_rows_are_kept_as_they_are_checked() -> None:
    kept: list[int] = []
    told = options("consistent", "triton", "batch_invariant")
    finished("qwen3_8b.256", "qwen3_8b.1", told=told, keep=lambda r: kept.append(len(r.rows)))
    assert kept == [1, 2, 3, 4, 5, 6]


def test_a_variant_has_left_before_the_next_ones_trainer_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here: list[str] = []
    bridge, close = Fake.bridge, Fake.close

    def bridged(self: Fake, fault: Any, **arguments: Any) -> None:
        assert here == []
        here.append(self.variant)
        bridge(self, fault, **arguments)

    def closed(self: Fake) -> None:
        if self.variant in here and self.role == "trainer":
            here.remove(self.variant)
        close(self)

    monkeypatch.setattr(Fake, "bridge", bridged)
    monkeypatch.setattr(Fake, "close", closed)
    result = finished(told=options("consistent", "triton")).result
    assert [row["variant"] for row in result.rows] == ["consistent", "triton"]


def test_peers_take_part_in_fewer_rounds() -> None:
    told = options("consistent", "triton", pairs=4, peer_pairs=2, warmups=0)
    assert {row["variant"]: row["pairs"] for row in finished(told=told).result.rows} == {
        "consistent": 4,
        "triton": 2,
    }


def test_a_peer_samples_anew_for_a_part_of_the_tokens() -> None:
    told = options("consistent", "batch_invariant", parity_tokens=40)
    work = dataclasses.replace(tiny(chosen(["qwen3_8b.ttft2k"])[0]), parity=(2, 8))
    made = ModelSession([work], told, Clock(lambda text: None))
    rows = {row["variant"]: row["compared_tokens"] for row in run_through(made).result.rows}
    assert rows == {"consistent": 48, "batch_invariant": 12}


def test_stock_ends_before_the_trainer_takes_its_memory() -> None:
    made = ModelSession([tiny(chosen(["smollm2.256"])[0])], options(), Clock(lambda text: None))
    made.launch()
    made.begin(MODEL)
    made.settle()
    made.time()
    stock = made.stock.engine
    bridge = Fake.bridge

    def checked(self: Fake, fault: Any, **arguments: Any) -> None:
        assert stock.closed
        bridge(self, fault, **arguments)

    Fake.bridge = checked
    try:
        made.check()
    finally:
        Fake.bridge = bridge
    assert made.result.rows


def test_trainer_runs_in_its_engines_environment() -> None:
    made = ModelSession([tiny(WORKS[0])], options(environment={"A": "1"}), Clock(lambda text: None))
    made.launch()
    seat = next(seat for seat in made.seats if seat.variant.name == "consistent")
    assert seat.trainer.environment == seat.engine.environment
    assert seat.engine.environment == {"A": "1"} | VARIANTS["consistent"].environment


def samples(*lengths: int) -> list[Sample]:
    return [Sample([1, 2], [3] * n, np.full(n, LOGPROB, np.float32)) for n in lengths]


def test_compare_counts_bits_not_values() -> None:
    given = [Sample([1], [2, 3], np.array([0.0, np.nan], np.float32))]
    same = [np.array([0.0, np.nan], np.float32)]
    assert compare(given, same, same).mismatched == 0
    found = compare(given, [np.array([-0.0, np.nan], np.float32)], same)
    assert (found.engine, found.trainer, found.mismatched) == (1, 0, 1)
    assert found.first.startswith("request 0, token 0: sampled 0.0, engine -0.0")


def test_compare_counts_a_token_once_and_names_the_first() -> None:
    given = samples(2, 3)
    other = [sample.logprobs.copy() for sample in given]
    other[1][1] = NEXT
    found = compare(given, other, other)
    assert (found.tokens, found.engine, found.trainer, found.mismatched) == (5, 1, 1, 1)
    assert found.first.startswith("request 1, token 1")


def test_enough_is_evenly_spread_and_no_more() -> None:
    given = samples(*[10] * 8)
    assert enough(given, 20) == [given[0], given[4]]
    assert enough(given, 1000) == given
    assert enough([], 5) == []
