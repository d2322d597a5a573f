"""Live call counters: which implementation of which op really ran in this process.

They are the process's: two engines of different programs in one process count each other's calls,
and their reports name them as a mismatch. Such engines need a process each.
"""

from __future__ import annotations

from collections import Counter

_CALLS: Counter[tuple[str, str]] = Counter()


def count(op: str, impl: str, calls: int = 1) -> None:
    """Count calls of `op` served by `impl`. Graph replays do not pass here; captures do."""
    _CALLS[op, impl] += calls


def snapshot() -> dict[str, dict[str, int]]:
    """Return {op: {impl: calls}} since the process started or `reset` was called."""
    result: dict[str, dict[str, int]] = {}
    for (op, impl), calls in sorted(_CALLS.items()):
        result.setdefault(op, {})[impl] = calls
    return result


def reset() -> None:
    """Forget all counts."""
    _CALLS.clear()
