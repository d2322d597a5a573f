"""Fixtures for kernel tests: every relation runs on each implementation this machine has."""

from __future__ import annotations

import pytest
from implementations import REFERENCE_CPU, TRITON_CUDA


@pytest.fixture(params=[REFERENCE_CPU, TRITON_CUDA])
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs; `triton` runs where CUDA is."""
    return request.param
