"""The reward: an exact answer, plus two small terms that tell wrong samples apart."""

from __future__ import annotations

import dataclasses
import re
from decimal import Decimal

FORMAT_WEIGHT = 0.1
BREVITY_WEIGHT = 0.05
_BREVITY_CHARS_PER_TOKEN = 8
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?!\d)(?:\.\d+)?")


@dataclasses.dataclass(frozen=True)
class Reward:
    """A sample's reward.

    Attributes:
        correct: the answer is right.
        total: 1 if correct, + 0.1 if it ended by itself and holds a number (or is the answer),
            + up to 0.05 for brevity. The two small terms exist because a group whose samples are
            all wrong, or all right, would otherwise have no advantage and give a zero gradient.
    """

    correct: bool
    total: float


def grade(response: str, answer: str) -> bool:
    """Return whether `response` gives `answer` exactly.

    An integer answer is compared with the last number of the response ("12", "-3", "1,204",
    "12.0"); any other answer with its last non-empty line.
    """
    expected = _integer(answer)
    if expected is None:
        lines = [line.strip() for line in response.splitlines() if line.strip()]
        return bool(lines) and lines[-1] == answer
    numbers = _NUMBER.findall(response)
    return bool(numbers) and Decimal(numbers[-1].replace(",", "")) == expected


def _integer(text: str) -> Decimal | None:
    return Decimal(text) if re.fullmatch(r"[+-]?\d+", text, flags=re.ASCII) else None


def reward(response: str, answer: str, *, finished: bool, max_tokens: int) -> Reward:
    """Grade one response.

    Args:
        response: decoded text without special tokens.
        answer: the problem's answer.
        finished: it ended with the end token, not at the length limit.
        max_tokens: the length limit, which scales brevity.
    """
    correct = grade(response, answer)
    well_formed = finished and (correct or bool(_NUMBER.search(response)))
    room = _BREVITY_CHARS_PER_TOKEN * max_tokens
    brevity = 1.0 - min(len(response), room) / room
    total = float(correct) + FORMAT_WEIGHT * float(well_formed) + BREVITY_WEIGHT * brevity
    return Reward(correct, total)
