"""The only file of the benchmarks that reads the environment."""

from __future__ import annotations

import os


def variables() -> dict[str, str]:
    """Return a copy of this process's environment: to hand on to a child, or to record."""
    return dict(os.environ)
