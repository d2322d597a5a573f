"""Linear has two more CPU implementations: our own GEMM and oneDNN's."""

from __future__ import annotations

import pytest
from implementations import LLVM_CPU, REFERENCE_CPU, TRITON_CUDA

from consistent_kernels.linear.onednn import native_bf16

ONEDNN_CPU = pytest.param(
    ("onednn", "cpu"),
    id="onednn-cpu",
    marks=pytest.mark.skipif(native_bf16() is None, reason="this CPU has no bf16 dot product"),
)


@pytest.fixture(params=[REFERENCE_CPU, LLVM_CPU, ONEDNN_CPU, TRITON_CUDA])
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs that this machine can run."""
    return request.param
