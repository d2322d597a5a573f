"""FP8 linear runs by the reference, by Triton and by DeepGEMM."""

from __future__ import annotations

import pytest
from implementations import DEEP_GEMM_CUDA, REFERENCE_CPU, TRITON_CUDA


@pytest.fixture(params=[REFERENCE_CPU, TRITON_CUDA, DEEP_GEMM_CUDA])
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs that this machine can run."""
    return request.param
