"""Grading is exact, and the small terms stay small."""

from __future__ import annotations

import pytest

from vllm_consistent.cli.demo.reward import BREVITY_WEIGHT, FORMAT_WEIGHT, grade, reward


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("The sum of 2 and 3 is 5.", "5", True),
        ("5", "5", True),
        ("First 5, then 6", "5", False),
        ("It is 12-5", "5", True),
        ("It is -5", "5", False),
        ("It is -5", "-5", True),
        ("1,204 in all", "1204", True),
        ("1,2345", "2345", True),
        ("12.0", "12", True),
        ("12.5", "5", False),
        ("12.5", "12", False),
        ("0012", "12", True),
        ("v1.2", "2", False),
        ("x5", "5", False),
        ("no number", "5", False),
        ("", "5", False),
        ("Let me see.\nyes\n\n", "yes", True),
        ("yes indeed", "yes", False),
        ("", "yes", False),
    ],
)
def test_grade(response: str, answer: str, right: bool) -> None:
    assert grade(response, answer) is right


def test_reward_orders_right_formed_and_wrong_samples() -> None:
    def total(text: str, finished: bool) -> float:
        return reward(text, "5", finished=finished, max_tokens=40).total

    right, formed, wrong = total("= 5", True), total("= 6", True), total("= six", True)
    assert right > formed > wrong
    assert right - formed == pytest.approx(1.0)
    assert formed - total("= 6", False) == pytest.approx(FORMAT_WEIGHT)


def test_reward_small_terms_never_outweigh_the_answer() -> None:
    best_wrong = reward("6", "5", finished=True, max_tokens=40)
    worst_right = reward("x " * 500 + "5", "5", finished=False, max_tokens=40)
    assert best_wrong.total <= FORMAT_WEIGHT + BREVITY_WEIGHT < worst_right.total
    assert worst_right.correct
    assert not best_wrong.correct


def test_reward_tells_wrong_samples_of_other_lengths_apart() -> None:
    short = reward("no", "5", finished=False, max_tokens=40)
    long = reward("no idea at all", "5", finished=False, max_tokens=40)
    assert short.total > long.total
