"""FP8 linear runs by the reference, by Triton and by DeepGEMM."""

from __future__ import annotations

import pytest
import torch
from implementations import REFERENCE_CPU, TRITON_CUDA

from consistent_kernels.errors import MissingBinaryError
from consistent_kernels.vendored import find_binary


def _has_deep_gemm() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10):
        return False
    try:
        return find_binary("deep_gemm").path.exists()
    except MissingBinaryError:
        return False


DEEP_GEMM_CUDA = pytest.param(
    ("deep_gemm", "cuda"),
    id="deep_gemm-cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not _has_deep_gemm(), reason="needs Hopper or Blackwell and vLLM's CUDA wheel"
        ),
    ],
)


@pytest.fixture(params=[REFERENCE_CPU, TRITON_CUDA, DEEP_GEMM_CUDA])
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs that this machine can run."""
    return request.param
