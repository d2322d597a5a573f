"""The only file of this package that reads the environment."""

from __future__ import annotations

import os

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS is run-to-run deterministic only with one of the workspaces below; it reads this once."""

_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


def cublas_is_deterministic() -> bool:
    """Return whether cuBLAS was started with a workspace that makes it deterministic."""
    return os.environ.get(CUBLAS_WORKSPACE, "") in _DETERMINISTIC_WORKSPACES
