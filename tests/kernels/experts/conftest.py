"""Experts run on the CPU through linear's programs, on CUDA through Triton and DeepGEMM."""

from __future__ import annotations

import functools

import pytest
import torch
from expert_cases import SHAPES
from implementations import DEEP_GEMM_CUDA, REFERENCE_CPU, TRITON_CUDA

from consistent_kernels.linear.onednn import native_bf16

ONEDNN_CPU = pytest.param(
    ("onednn", "cpu"),
    id="onednn-cpu",
    marks=pytest.mark.skipif(native_bf16() is None, reason="this CPU has no bf16 dot product"),
)


@functools.cache
def _compiled() -> None:
    # All kernels at once: one by one, at their first use, they would take minutes.
    from consistent_kernels.deep_gemm_start import prepare
    from consistent_kernels.experts.deep_gemm_start import layer_shapes

    shapes = {
        gemm
        for shape in SHAPES.values()
        for gemm in layer_shapes(shape.experts, shape.hidden, shape.width, 2100 * shape.slots)
    }
    # A quarter of the experts, as in tests of one rank's.
    shapes.update(layer_shapes(4, 192, 128, 2100))
    prepare(shapes, torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture(params=[REFERENCE_CPU, ONEDNN_CPU, TRITON_CUDA, DEEP_GEMM_CUDA])
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs that this machine can run."""
    if request.param[0] == "deep_gemm":
        _compiled()
    return request.param
