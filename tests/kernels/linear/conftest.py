"""Linear has one more implementation than the other ops: oneDNN's bf16 GEMM."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.linear.onednn import native_bf16

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(
    params=[
        pytest.param(("reference", "cpu"), id="reference-cpu"),
        pytest.param(
            ("onednn", "cpu"),
            id="onednn-cpu",
            marks=pytest.mark.skipif(
                native_bf16() is None, reason="this CPU has no bf16 dot product"
            ),
        ),
        pytest.param(
            ("triton", "cuda"),
            id="triton-cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not HAS_CUDA, reason="the Triton program needs a CUDA device"),
            ],
        ),
    ]
)
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs that this machine can run."""
    return request.param
