"""Python in a new process that finds the modules this one finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with `variables` and its own search path."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, **variables}


def run_python(
    *arguments: str | Path,
    cwd: Path | None = None,
    timeout: float | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` and wait; the caller looks at the exit code.

    Args:
        arguments: of the interpreter.
        cwd: the folder to run in, by default this process's.
        timeout: seconds, or None.
        variables: of the environment.
    """
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(**variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
