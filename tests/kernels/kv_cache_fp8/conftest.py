"""The FP8 caches have a third program, of which the gather of V4 is its own."""

from __future__ import annotations

import pytest
from implementations import NVRTC_CUDA, REFERENCE_CPU, TRITON_CUDA


@pytest.fixture(params=[REFERENCE_CPU, TRITON_CUDA, NVRTC_CUDA])
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs of this op."""
    return request.param
