"""Run a snippet with Triton's interpreter, which must be asked for before Triton is imported."""

from __future__ import annotations

from child_process import run_python


def output_interpreted(source: str, *, timeout: float | None = None) -> str:
    """Return what `source` prints in a new process; fails with its errors otherwise.

    Args:
        source: Python; modules are found as in this process.
        timeout: seconds, or None.
    """
    done = run_python("-c", source, timeout=timeout, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return done.stdout
