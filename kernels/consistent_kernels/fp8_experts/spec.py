"""What FP8 experts compute, and the pinned schedule of each implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consistent_kernels.contract import OpSpec, Program, Scalar
from consistent_kernels.program_source import source_sha256

if TYPE_CHECKING:
    from consistent_kernels.model_facts import ModelFacts

SPEC = OpSpec(
    op="fp8_experts",
    version=1,
    fields={
        "formula": "experts, with fp8_linear in place of each GEMM",
        "weight": "master to the model dtype, then 128 x 128 blocks of each expert (quantization)",
        "input": "x and silu(gate) * up quantized per row in groups of 128 (quantization)",
        "gate_up": "rounded to the model dtype",
        "activation": "as experts: fp32, rounded once to the model dtype, before quantization",
        "down": "rounded to the model dtype, unweighted",
        "combine": "as experts",
    },
)

BLOCK_K = 128
"""Columns that share a scale: one partial sum."""

TILE_M, TILE_N = 64, 128
"""Triton: one tile for any counts, the one of fp8_linear: fewer rows would be another instruction,
which adds in another order."""

NUM_WARPS, NUM_STAGES = 4, 4

_FILES = {
    "reference": ("reference.py",),
    "triton": ("triton.py",),
    "deep_gemm": (
        "deep_gemm.py",
        "deep_gemm_grouped.py",
        "deep_gemm_packed.py",
        "deep_gemm_rows.py",
    ),
}
_EXPERTS = {
    "reference": ("experts/reference.py", "linear/tiles.py"),
    "triton": (
        "experts/triton_activation.py",
        "experts/triton_layout.py",
        "experts/triton.py",
        "alignment.py",
    ),
    "deep_gemm": (
        "experts/deep_gemm_grouped.py",
        "experts/deep_gemm_places.py",
        "experts/deep_gemm_rows.py",
        "experts/triton.py",
        "experts/triton_activation.py",
        "quantization/triton.py",
        "alignment.py",
        "vendored.py",
    ),
}

IMPLEMENTATIONS = tuple(_FILES)


def quantization_of(impl: str) -> str:
    """Return the implementation of `quantization` that feeds `impl`."""
    return "reference" if impl == "reference" else "triton"


def experts_of(impl: str) -> str:
    """Return the implementation of `experts` whose combination `impl` uses."""
    return "reference" if impl == "reference" else "triton"


def choose(device_type: str, arch: str | None = None, facts: ModelFacts | None = None) -> str:
    """Return the implementation for a device, the one of `fp8_linear`; arguments as there."""
    from consistent_kernels.fp8_linear import spec as fp8_linear

    return fp8_linear.choose(device_type, arch, facts)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference", "triton" or "deep_gemm").

    Raises:
        MissingBinaryError: "deep_gemm" where vLLM's CUDA wheel or nvcc is missing.
    """
    source = source_sha256("fp8_experts", "spec.py", *_FILES[impl], shared=_EXPERTS[impl])
    return Program(impl, source, _schedule(impl))


def _schedule(impl: str) -> dict[str, Scalar]:
    promotion = {"promotion": "multiply, then add"}
    if impl == "triton":
        tile = {"tile_m": TILE_M, "tile_n": TILE_N, "num_warps": NUM_WARPS}
        return {**tile, "num_stages": NUM_STAGES, **promotion}
    if impl == "deep_gemm":
        from consistent_kernels.fp8_linear import spec as fp8_linear

        return dict(fp8_linear.program(impl).schedule)
    from consistent_kernels.linear import spec as linear

    return {**promotion, **linear.program("reference").schedule}
