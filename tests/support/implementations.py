"""The programs that kernel tests run on: (implementation, device) pairs, as pytest parameters."""

import pytest
import torch

from consistent_kernels import llvm
from consistent_kernels.errors import MissingBinaryError
from consistent_kernels.vendored import find_binary

REFERENCE_CPU = pytest.param(("reference", "cpu"), id="reference-cpu")
LLVM_CPU = pytest.param(
    ("llvm", "cpu"),
    id="llvm-cpu",
    marks=pytest.mark.skipif(
        not llvm.is_available(), reason="needs an x86-64 CPU with AVX2, and llvmlite"
    ),
)
TRITON_CUDA = pytest.param(
    ("triton", "cuda"),
    id="triton-cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available(), reason="the Triton program needs a CUDA device"
        ),
    ],
)

NVRTC_CUDA = pytest.param(
    ("cuda", "cuda"),
    id="nvrtc-cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available(), reason="the CUDA program needs a CUDA device"
        ),
    ],
)


def _has_deep_gemm() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10):
        return False
    try:
        return find_binary("deep_gemm").path.exists()
    except MissingBinaryError:
        return False


HAS_DEEP_GEMM = _has_deep_gemm()
DEEP_GEMM_CUDA = pytest.param(
    ("deep_gemm", "cuda"),
    id="deep_gemm-cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not HAS_DEEP_GEMM, reason="needs Hopper or Blackwell and vLLM's CUDA wheel"
        ),
    ],
)
