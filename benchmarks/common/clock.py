"""Progress: phases with their times, to see where scarce device time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Clock:
    """Says when a phase begins and ends, and remembers how long each took."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._zero = time.perf_counter()
        self.phases: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body of a `with`."""
        begin = time.perf_counter()
        self._tell(f"[{begin - self._zero:6.1f} s] {name} ...")
        try:
            yield
        finally:
            end = time.perf_counter()
            self.phases.append((name, end - begin))
            self._tell(f"[{end - self._zero:6.1f} s] {name}: {end - begin:.1f} s")

    def tell(self, text: str) -> None:
        """Print a line with the time."""
        self._tell(f"[{time.perf_counter() - self._zero:6.1f} s] {text}")

    def summary(self) -> list[str]:
        """Return one line for each phase, the longest first."""
        longest_first = sorted(self.phases, key=lambda phase: -phase[1])
        return [f"{seconds:8.1f} s  {name}" for name, seconds in longest_first]
