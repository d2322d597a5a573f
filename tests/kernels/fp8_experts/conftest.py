"""FP8 experts run by the reference, by Triton and by DeepGEMM."""

from __future__ import annotations

import functools

import pytest
import torch
from fp8_expert_places import EXPERTS, HIDDEN, WIDTH
from implementations import DEEP_GEMM_CUDA, REFERENCE_CPU, TRITON_CUDA

FORMATS = ("fp32", "ue8m0")


@functools.cache
def _compiled() -> None:
    # All kernels at once: one by one, at their first use, they would take minutes.
    from consistent_kernels.deep_gemm_start import prepare
    from consistent_kernels.fp8_experts.deep_gemm_start import layer_shapes
    from consistent_kernels.fp8_linear.deep_gemm import Fp8GemmShape

    shapes = {shape for f in FORMATS for shape in layer_shapes(6, 256, 128, 2100 * 3, f)}
    # Half of the experts, as in a test of one rank's; the layers of other files; one MLP alone.
    for layer in ((3, 256, 128), (EXPERTS, HIDDEN, WIDTH), (8, 512, 256)):
        shapes |= {shape for f in FORMATS for shape in layer_shapes(*layer, 1024, f)}
    shapes |= {Fp8GemmShape(n, k, 1024, f) for n, k in ((128, 256), (256, 128)) for f in FORMATS}
    prepare(shapes, torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def compiled() -> None:
    """DeepGEMM's kernels of these tests."""
    _compiled()


@pytest.fixture(params=[REFERENCE_CPU, TRITON_CUDA, DEEP_GEMM_CUDA])
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs that this machine can run."""
    if request.param[0] == "deep_gemm":
        _compiled()
    return request.param
