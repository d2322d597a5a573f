"""The grouped linear runs on the CPU, and on CUDA through Triton and DeepGEMM."""

from __future__ import annotations

import functools

import pytest
import torch
from grouped_linear_cases import COLUMNS, GROUPS, INNER, TOKENS
from implementations import DEEP_GEMM_CUDA, REFERENCE_CPU, TRITON_CUDA


@functools.cache
def _compiled() -> None:
    # All kernels at once: one by one, at their first use, they would take minutes.
    from consistent_kernels.deep_gemm_start import prepare
    from consistent_kernels.grouped_linear.deep_gemm_start import layer_shapes

    weights = [(groups, COLUMNS, INNER) for groups in (1, GROUPS)]
    device = torch.device("cuda", torch.cuda.current_device())
    prepare(layer_shapes(weights, TOKENS), device)


@pytest.fixture(params=[REFERENCE_CPU, TRITON_CUDA, DEEP_GEMM_CUDA])
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs that this machine can run."""
    if request.param[0] == "deep_gemm":
        _compiled()
    return request.param
