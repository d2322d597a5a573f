"""token_logprobs runs on the CPU through the reference and through our own compiled loop."""

from __future__ import annotations

import pytest
from implementations import LLVM_CPU, REFERENCE_CPU, TRITON_CUDA


@pytest.fixture(params=[REFERENCE_CPU, LLVM_CPU, TRITON_CUDA])
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs that this machine can run."""
    return request.param
