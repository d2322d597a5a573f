"""Engines that take turns within a round: what is counted, and what a machine's drift does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.rollout.process import ProcessError
from benchmarks.rollout.turns import in_turns
from benchmarks.rollout.works import DECODE, Work, chosen
from consistent_kernels.errors import InvalidInputError

WORK = dataclasses.replace(chosen(["qwen3_8b.1"])[0], requests=2, new_tokens=10)


class Machine:
    """Its speed changes with every second slice that runs on it."""

    def __init__(self) -> None:
        self.slices = 0

    def slowness(self) -> float:
        self.slices += 1
        return 1.0 + (self.slices - 1) // 2


@dataclasses.dataclass
class Engine:
    """Takes `step_seconds` a step on a machine at its best; one token of each request a step.

    The first slice reads prompts: it ends with the first token of `first` of them.
    """

    machine: Machine
    step_seconds: float
    first: int = 2
    dies_in: int = 99

    def __post_init__(self) -> None:
        self.engine = self
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, method: str, **arguments: Any) -> Any:
        self.calls.append((method, arguments))
        slices = sum(name == "advance" for name, _ in self.calls)
        if slices > self.dies_in:
            raise ProcessError("it died")
        if method == "finish":
            return ["a sample"]
        if method == "begin":
            return None
        tokens = min(20, self.first + 6 * (slices - 1))
        return {
            "seconds": 3 * self.step_seconds * self.machine.slowness(),
            "tokens": tokens,
            "started": self.first if slices == 1 else 2,
            "unfinished": tokens < 20,
        }


def played(players: list[Engine], work: Work = WORK) -> list[tuple[Engine, float, Any]]:
    here = list(players)

    @contextlib.contextmanager
    def guard(player: Engine) -> Iterator[None]:
        try:
            yield
        except ProcessError:
            here.remove(player)

    return in_turns(players, work, [[1], [2]], here.__contains__, guard)


def test_a_drift_of_the_machine_leaves_the_ratio_alone() -> None:
    machine = Machine()
    (_, ours, _), (_, stock, _) = played([Engine(machine, 0.8), Engine(machine, 1.0)])
    assert ours / stock == pytest.approx(1.25)
    machine = Machine()
    ((_, first, _),) = played([Engine(machine, 0.8)])
    ((_, second, _),) = played([Engine(machine, 1.0)])
    assert first / second > 2, "control: one rollout after the other measures the machine"


def test_engines_of_a_turn_share_a_core_and_the_first_one_alternates() -> None:
    machine = Machine()
    players = [Engine(machine, 1.0), Engine(machine, 1.0)]
    order: list[int] = []
    for index, player in enumerate(players):
        call = player.call

        def noted(method: str, index: int = index, call: Any = call, **arguments: Any) -> Any:
            if method == "advance":
                order.append(index)
            return call(method, **arguments)

        player.call = noted
    played(players)
    assert order == [0, 1, 1, 0, 0, 1, 1, 0]
    for player in players:
        steps = [arguments for name, arguments in player.calls if name == "advance"]
        assert steps == [{"steps": WORK.slice_steps, "core": turn} for turn in range(4)]


@pytest.mark.parametrize(("first", "tokens"), [(2, 18), (1, 13)])
def test_decoding_counts_from_when_every_request_has_a_token(first: int, tokens: int) -> None:
    """After the first slice, or the second where the first leaves a request without one."""
    engine = Engine(Machine(), 1.0, first=first)
    work = dataclasses.replace(WORK, measure=DECODE)
    ((_, rate, _),) = played([engine], work)
    slices = sum(name == "advance" for name, _ in engine.calls)
    slow = [1.0 + index // 2 for index in range(slices)]
    seconds = 3 * sum(slow[1:] if first == 2 else slow[2:])
    assert rate == pytest.approx(tokens / seconds)
    steps = [arguments["steps"] for name, arguments in engine.calls if name == "advance"]
    single = 1 if first == 2 else 2
    assert steps == [1] * single + [WORK.slice_steps] * (slices - single)


def test_an_engine_that_dies_leaves_the_round_to_the_others() -> None:
    machine = Machine()
    players = [Engine(machine, 1.0, dies_in=2), Engine(machine, 1.0)]
    ((player, rate, samples),) = played(players)
    assert player is players[1]
    assert rate > 0
    assert samples == ["a sample"]


def test_a_decode_work_of_one_token_is_refused() -> None:
    work = dataclasses.replace(WORK, measure=DECODE, new_tokens=1)
    with pytest.raises(InvalidInputError, match="tokens after the first"):
        played([Engine(Machine(), 1.0, first=20)], work)
