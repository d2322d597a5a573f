"""Rounds that several engines run at once, a slice of engine steps each in turn.

A virtual machine's cores change their speed by up to three times, several times a second, and an
engine of a small model runs at the speed of its host. Two rollouts one after the other then measure
the machine; slices of some 50 ms, on one core, meet the same machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from benchmarks.rollout.samples import Sample
from benchmarks.rollout.works import DECODE, Work
from consistent_kernels.errors import invalid


class Player(Protocol):
    """What takes turns: a seat of the session."""

    engine: Any


@dataclasses.dataclass
class Score:
    """What one engine has done in a round so far.

    Attributes:
        tokens, seconds: of the slices that count: all, or with DECODE those after every request
            had its first token.
        last: all tokens so far.
        unfinished: whether requests are left.
        counts: whether the next slice counts.
    """

    counts: bool
    tokens: int = 0
    seconds: float = 0.0
    last: int = 0
    unfinished: bool = True

    def add(self, told: dict[str, Any], requests: int) -> None:
        """Take what `Engine.advance` returned."""
        if self.counts:
            self.tokens += told["tokens"] - self.last
            self.seconds += told["seconds"]
        self.last, self.unfinished = told["tokens"], told["unfinished"]
        self.counts = self.counts or told["started"] == requests


def in_turns(
    players: Sequence[Player],
    work: Work,
    prompts: list[list[int]],
    there: Callable[[Player], bool],
    guard: Callable[[Player], AbstractContextManager[None]],
) -> list[tuple[Player, float, list[Sample]]]:
    """Run one round; engines advance A B, B A, A B, ... until all have finished.

    Args:
        players: in the order of the first turn.
        work: requests, tokens, what is measured, steps of a slice.
        prompts: of every engine.
        there: whether a player is still in the session.
        guard: swallows the end of a player's engine and takes it out of the session.

    Returns:
        (player, tokens/s, samples) of those that reached the end, in the order of `players`.

    Raises:
        InvalidInputError: a decode work that ends with the first token of its requests.
    """
    scores = {index: Score(counts=work.measure != DECODE) for index in range(len(players))}
    for player in players:
        with guard(player):
            player.engine.call("begin", prompts=prompts, tokens=work.new_tokens, cached=work.cached)
    turn = 0
    while True:
        order = [
            index
            for index, player in enumerate(players)
            if there(player) and scores[index].unfinished
        ]
        if not order:
            break
        for index in order[:: 1 if turn % 2 == 0 else -1]:
            with guard(players[index]):
                # Step by step up to where counting begins.
                steps = work.slice_steps if scores[index].counts else 1
                told = players[index].engine.call("advance", steps=steps, core=turn)
                scores[index].add(told, work.requests)
        turn += 1
    done = []
    for index, player in enumerate(players):
        if there(player):
            with guard(player):
                samples = player.engine.call("finish")
                if not scores[index].seconds:
                    raise invalid(
                        "benchmarks.rollout", work.key, "tokens after the first", work.new_tokens
                    )
                done.append((player, scores[index].tokens / scores[index].seconds, samples))
    return done
