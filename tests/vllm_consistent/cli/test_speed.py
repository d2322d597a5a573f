"""The timed work: equal on both sides, prompts read every time, robust against one bad round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_consistent.cli.demo import rollout, speed
from vllm_consistent.cli.demo.speed import Rates, Speed

WORK = {"prompt_ids": [[1, 2], [3]], "seeds": [5, 6], "samples": 3, "temperature": 1.0}


class Clock:
    """Time that only the engine below moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Engine:
    """Takes 2 s for prompts that it has not read, and half a second a decode step."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.is_cached = clock, False
        self.asked: list[Any] = []

    def reset_prefix_cache(self) -> None:
        self.is_cached = False

    def generate(self, requests: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.asked.append(params)
        self.clock.now += 0.5 * (params[0].max_tokens - 1) + (0.0 if self.is_cached else 2.0)
        self.is_cached = True
        return [self.output(each) for each in params]

    def output(self, params: Any) -> Any:
        ids = list(range(params.max_tokens))
        logprobs = [{i: SimpleNamespace(logprob=-1.0)} for i in ids]
        return SimpleNamespace(
            outputs=[
                SimpleNamespace(token_ids=ids, logprobs=logprobs, index=i, finish_reason="length")
                for i in range(params.n)
            ]
        )


def timed(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> tuple[Rates, Engine]:
    clock = Clock()
    monkeypatch.setattr(rollout, "time", clock)
    engine = Engine(clock)
    speed.warm_up(engine, WORK | {"max_tokens": max_tokens})
    return speed.time_rollout(engine, WORK | {"max_tokens": max_tokens}), engine


def test_prompts_are_read_in_every_round_and_decode_is_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates, _ = timed(monkeypatch, 9)
    assert rates.rollout == pytest.approx(6 * 9 / (2.0 + 8 * 0.5))
    assert rates.decode == pytest.approx(6 / 0.5)
    monkeypatch.setattr(Engine, "reset_prefix_cache", lambda self: None)
    cached, _ = timed(monkeypatch, 9)
    assert cached.rollout == pytest.approx(6 * 9 / (8 * 0.5)), "control: a cache would show"


def test_every_response_has_its_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = timed(monkeypatch, 9)
    for params in (each for call in engine.asked for each in call):
        assert params.ignore_eos
        assert not params.detokenize
        assert params.n == 3
    assert [params[0].max_tokens for params in engine.asked] == [2, 1, 9]


def test_responses_of_one_token_have_no_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, _ = timed(monkeypatch, 1)
    assert rates == Rates(pytest.approx(6 / 2.0), None)
    assert Speed((rates,), (rates,)).summary("decode") == dict.fromkeys(
        ("consistent", "stock", "ratio")
    )


def rounds(*values: float) -> tuple[Rates, ...]:
    return tuple(Rates(value, 2 * value) for value in values)


def test_ratio_is_of_rounds_that_ran_side_by_side() -> None:
    pace = Speed(rounds(80.0, 40.0, 80.0, 40.0, 80.0), rounds(20.0, 10.0, 20.0, 10.0, 20.0))
    assert pace.summary("rollout") == {"consistent": 80.0, "stock": 20.0, "ratio": 4.0}
    assert pace.summary("decode")["ratio"] == 4.0
    one_bad = Speed(rounds(80.0, 80.0, 80.0), rounds(20.0, 1.0, 20.0))
    assert one_bad.summary("rollout")["ratio"] == 4.0
    slower = Speed(rounds(60.0, 60.0, 60.0), rounds(20.0, 20.0, 20.0))
    assert slower.summary("rollout")["ratio"] == 3.0, "control: a lower speed shows"


def test_engines_take_turns_and_a_slow_one_gets_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = Clock(), []
    monkeypatch.setattr(speed, "time", clock)

    def rate(name: str, seconds: float) -> Rates:
        order.append(name)
        clock.now += seconds
        return Rates(1.0, None)

    found = speed.compare_speed(lambda: rate("ours", 1.0), lambda: rate("stock", 4.0))
    assert order == ["ours", "stock"] * speed.ROUNDS
    assert len(found.ours) == len(found.stock) == speed.ROUNDS
    order.clear()
    speed.compare_speed(lambda: rate("ours", 10.0), lambda: rate("stock", 200.0))
    assert order == ["ours", "stock"]
    assert speed.compare_speed(lambda: rate("ours", 1.0), None).stock == ()


def test_speed_is_read_back_as_it_was_written() -> None:
    found = Speed(rounds(3.0), (Rates(1.0, None),))
    assert Speed.from_dict(found.to_dict()) == found
    assert set(speed.speed_row(found)) == {
        "perf/timed_rollout_tokens_per_s", "stock/perf/timed_rollout_tokens_per_s",
        "perf/timed_rollout_ratio_to_stock", "perf/timed_decode_tokens_per_s",
    }  # fmt: skip
