"""The timed batch: what is timed is decode, whatever prompts and the first call cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_consistent.cli.demo import rollout

PROBE = {"prompt_ids": [[1, 2], [3]], "seeds": [5, 6], "samples": 3, "temperature": 1.0}


class Clock:
    """Time that only the engine below moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Engine:
    """Takes 7 s at first, then `prompt` seconds a call and `token` seconds a decode step."""

    def __init__(self, clock: Clock, prompt: list[float], token: list[float]) -> None:
        self.clock, self.prompt, self.token = clock, prompt, token
        self.asked: list[Any] = []

    def generate(self, requests: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        turn = max(0, len(self.asked) - 1) // 2
        self.asked.append(params)
        self.clock.now += self.prompt[turn] + (params[0].max_tokens - 1) * self.token[turn]
        self.clock.now += 7.0 * (len(self.asked) == 1)
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


def rate(monkeypatch: pytest.MonkeyPatch, max_tokens: int, **costs: Any) -> tuple[float, Engine]:
    clock = Clock()
    monkeypatch.setattr(rollout, "time", clock)
    engine = Engine(clock, **costs)
    return rollout.time_decode(engine, PROBE | {"max_tokens": max_tokens}), engine


def test_prompts_and_start_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, _ = rate(monkeypatch, 9, prompt=[9.0, 9.0, 9.0], token=[0.5, 0.5, 0.5])
    quick, _ = rate(monkeypatch, 9, prompt=[0.1, 0.1, 0.1], token=[0.5, 0.5, 0.5])
    assert slow == pytest.approx(6 / 0.5)
    assert quick == pytest.approx(slow)


def test_one_disturbed_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed, _ = rate(monkeypatch, 9, prompt=[1.0, 1.0, 1.0], token=[0.5, 40.0, 0.5])
    assert disturbed == pytest.approx(6 / 0.5)
    faster, _ = rate(monkeypatch, 9, prompt=[1.0, 1.0, 1.0], token=[0.25, 0.25, 0.25])
    assert faster == pytest.approx(2 * disturbed), "control: the token's time shows"


def test_every_response_has_its_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = rate(monkeypatch, 9, prompt=[1.0, 1.0, 1.0], token=[0.5, 0.5, 0.5])
    for params in (each for call in engine.asked for each in call):
        assert params.ignore_eos
        assert not params.detokenize
        assert params.n == 3
    assert [params[0].max_tokens for params in engine.asked] == [2, 1, 9, 1, 9, 1, 9]


def test_responses_of_one_token_are_timed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    only, _ = rate(monkeypatch, 1, prompt=[2.0, 2.0, 2.0], token=[0.5, 0.5, 0.5])
    assert only == pytest.approx(6 / 2.0)
