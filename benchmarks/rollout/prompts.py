"""Prompts of wanted lengths: random tokens for random weights, worked sums for real ones.

A real model is at a loss after random tokens, and its distributions are flat; after a chat about
sums they are peaked, as in a rollout.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from consistent_kernels.errors import invalid

PromptSource = Callable[[str, int, tuple[int, int]], list[list[int]]]
"""(seed, count, (shortest, longest)) to so many prompts, the same for the same arguments."""


def _lengths(seed: str, count: int, length: tuple[int, int]) -> tuple[torch.Generator, list[int]]:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    drawn = torch.randint(length[0], length[1] + 1, (count,), generator=generator)
    return generator, drawn.tolist()


@dataclasses.dataclass(frozen=True)
class RandomPrompts:
    """Random token ids below `vocabulary`."""

    vocabulary: int

    def __call__(self, seed: str, count: int, length: tuple[int, int]) -> list[list[int]]:
        """Return `count` prompts."""
        generator, lengths = _lengths(seed, count, length)
        # Low ids are often special tokens.
        ids = torch.randint(16, self.vocabulary, (sum(lengths),), generator=generator)
        return [part.tolist() for part in ids.split(lengths)]


class ChatPrompts:
    """Chats whose user shows worked sums and asks one more, cut to length in front.

    Args:
        folder: of a model whose tokenizer has a chat template.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        mark = "@@@"
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
        )
        begin, _, end = text.partition(mark)
        self._begin, self._end = self._ids(begin), self._ids(end)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def __call__(self, seed: str, count: int, length: tuple[int, int]) -> list[list[int]]:
        """Return `count` prompts.

        Raises:
            InvalidInputError: shorter ones are asked for than a chat with one question.
        """
        generator, lengths = _lengths(seed, count, length)
        numbers = torch.randint(2, 100, (count, 2), generator=generator).tolist()
        examples = self._ids("".join(_worked(i, 7 * i % 89 + 3) for i in range(3, 93)))
        prompts = []
        for size, (a, b) in zip(lengths, numbers, strict=True):
            question = self._ids(f"\nWhat is {a} + {b}? Explain step by step.")
            room = size - len(self._begin) - len(question) - len(self._end)
            if not 0 <= room <= len(examples):
                fixed = size - room
                raise invalid("ChatPrompts", "length", f"{fixed} to {fixed + len(examples)}", size)
            shown = examples[len(examples) - room :]
            prompts.append([*self._begin, *shown, *question, *self._end])
        return prompts


def _worked(a: int, b: int) -> str:
    return f"\nWhat is {a} + {b}? {a} + {b} = {a + b}."
