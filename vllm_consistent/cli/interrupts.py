"""Interruption of a command: what was reached is kept, and processes and folders are tidied up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT, which a shell's `&` sets to ignored, and SIGTERM into KeyboardInterrupt."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, _interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
