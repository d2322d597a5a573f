"""Problems with an answer that can be checked: small sums, or a JSONL file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from consistent_kernels.errors import ConfigurationError, invalid

Message = dict[str, str]
_SHOWN_ERRORS = 10


@dataclasses.dataclass(frozen=True)
class Problem:
    """A chat that ends with the user's question, and the answer it is graded against."""

    messages: tuple[Message, ...]
    answer: str


class ProblemSource(Protocol):
    """Where the problems of a step come from."""

    def problems(self, step: int, count: int) -> list[Problem]:
        """Return the `count` problems of `step`; the same ones whenever they are asked for."""

    def describe(self) -> str:
        """Return one line for the report."""


class Arithmetic:
    """Sums of two one-digit numbers after one worked example: within reach of 135M parameters.

    Without the example the model talks about adding and is right on one in fifteen; with it, about
    on every second, and most groups hold right and wrong samples, which is what GRPO learns from.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def problems(self, step: int, count: int) -> list[Problem]:
        """Draw `count` problems, different ones as long as there are."""
        rng = random.Random(f"{self.seed}/{step}")
        pairs = list(product(range(1, 10), repeat=2))
        chosen = rng.sample(pairs, count) if count <= len(pairs) else rng.choices(pairs, k=count)
        return [_sum_problem(a, b) for a, b in chosen]

    def describe(self) -> str:
        """Return one line for the report."""
        return "sums of two one-digit numbers, one worked example in the prompt"


def _sum_problem(a: int, b: int) -> Problem:
    messages = (
        {"role": "system", "content": "Add the numbers."},
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "The sum of 2 and 3 is 5."},
        {"role": "user", "content": f"What is {a} + {b}?"},
    )
    return Problem(messages, str(a + b))


class JsonlProblems:
    """Problems of a JSONL file, taken in file order and from the start again after the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all = load_jsonl(path)

    def problems(self, step: int, count: int) -> list[Problem]:
        """Return the `count` problems that follow those of the step before."""
        return [self.all[(step * count + i) % len(self.all)] for i in range(count)]

    def describe(self) -> str:
        """Return one line for the report."""
        digest = hashlib.sha256(self.path.read_bytes()).hexdigest()[:12]
        return f"{self.path.name}: {len(self.all)} problems, sha256 {digest}"


def problem_source(data: Path | None, seed: int) -> ProblemSource:
    """Return the source that `--data` names; arithmetic when it is absent."""
    return Arithmetic(seed) if data is None else JsonlProblems(data)


def check_same_problems(now: str, recorded: str | None) -> None:
    """Raise InvalidInputError where a resumed run would go on with other problems.

    Args:
        now: `describe()` of the problems at hand.
        recorded: that of the run's beginning; None where it was not recorded.
    """
    if recorded not in (None, now):
        raise invalid(
            "demo --resume",
            "--data",
            f"as when the run began ({recorded})",
            now,
            "Restore the file, or start a new run in another --out",
        )


def load_jsonl(path: Path) -> list[Problem]:
    """Read {"prompt": text or chat messages, "answer": integer or text} per line.

    Blank lines are skipped. Every broken line is reported, by number, in one error.

    Raises:
        ConfigurationError: broken lines, or a file that is not UTF-8.
        InvalidInputError: no problem in the file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ConfigurationError([f"line {line}: not UTF-8 ({error.reason})"], str(path)) from error
    problems, violations = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            problems.append(_parse(json.loads(line)))
        except json.JSONDecodeError as error:
            violations.append(f"line {number}: not JSON ({error.msg} at column {error.colno})")
        except ValueError as error:
            violations.append(f"line {number}: {error}")
        except RecursionError:
            violations.append(f"line {number}: nested too deeply")
    if violations:
        hidden = len(violations) - _SHOWN_ERRORS
        shown = violations[:_SHOWN_ERRORS]
        if hidden > 0:
            shown.append(f"and {hidden} more broken lines")
        raise ConfigurationError(shown, str(path))
    if not problems:
        raise invalid("demo", "--data", "a JSONL file with at least one problem", f"{path}: none")
    return problems


def _parse(record: Any) -> Problem:
    # A lone surrogate ("\ud800") is JSON, and no text that a tokenizer takes.
    json.dumps(record, ensure_ascii=False).encode()
    if not isinstance(record, dict):
        raise ValueError('must be an object {"prompt": ..., "answer": ...}')
    for key in ("prompt", "answer"):
        if key not in record:
            raise ValueError(f"key {key!r} is missing")
    answer = record["answer"]
    if isinstance(answer, bool) or not isinstance(answer, int | str) or str(answer).strip() == "":
        raise ValueError(f"answer must be an integer or a text, got {answer!r}")
    prompt = record["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("prompt is empty")
        return Problem(({"role": "user", "content": prompt},), str(answer).strip())
    if not isinstance(prompt, list) or not prompt or not all(map(_is_message, prompt)):
        raise ValueError(
            "prompt must be a text or a non-empty list of "
            '{"role": "system"|"user"|"assistant", "content": text}'
        )
    return Problem(tuple(prompt), str(answer).strip())


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and value["role"] in ("system", "user", "assistant")
        and isinstance(value["content"], str)
    )


def render(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the prompt's token ids: the chat template, or plain lines where there is none.

    Raises:
        InvalidInputError: the template does not take these messages, or makes no token of them.
    """
    from jinja2 import TemplateError

    ids: list[int]
    if getattr(tokenizer, "chat_template", None):
        try:
            ids = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise invalid(
                "demo",
                "prompt",
                "messages that the model's chat template takes",
                f"roles {[message['role'] for message in messages]}: {error}",
            ) from error
    else:
        text = "".join(f"{message['content']}\n" for message in messages)
        ids = tokenizer(text)["input_ids"]
    if not ids:
        raise invalid("demo", "prompt", "at least one token", f"none from {list(messages)}")
    return ids
