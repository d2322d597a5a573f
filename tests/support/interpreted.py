"""Run a snippet with Triton's interpreter, which must be asked for before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys


def output_interpreted(source: str, *, timeout: float | None = None) -> str:
    """Return what `source` prints in a new process; fails with its errors otherwise.

    Args:
        source: Python; modules are found as in this process.
        timeout: seconds, or None.
    """
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
