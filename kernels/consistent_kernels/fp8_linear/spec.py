"""What an FP8 linear layer computes, and the pinned schedule of each implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consistent_kernels.contract import OpSpec, Program, Scalar
from consistent_kernels.program_source import source_sha256

if TYPE_CHECKING:
    from consistent_kernels.model_facts import ModelFacts

SPEC = OpSpec(
    op="fp8_linear",
    version=1,
    fields={
        "formula": "y = round(sum_b (sum_k x[b, k] * w[n, b, k]) * (s_x[b] * s_w[n / 128, b]))",
        "input": "x quantized per row in groups of 128 (quantization)",
        "weight": "master to the model dtype, then 128 x 128 blocks (quantization)",
        "accumulate": "fp32 inside a block of 128 k; the blocks promoted in fp32, ascending",
        "scale": "s_x * s_w rounded to fp32, then times the block's sum",
        "rounding": "once, to the output dtype",
    },
)

BLOCK_K = 128
"""Columns that share a scale: one partial sum."""

TILE_M, TILE_N = 64, 128
"""Triton: one tile for any number of rows. 64 rows is the smallest that Hopper's WGMMA takes;
fewer would use another instruction, which adds in another order."""

NUM_WARPS, NUM_STAGES = 4, 4

GROUP_ROWS = 8
"""Triton: row tiles that share a pass over the weight; a launch order, which moves no bits."""

DEEP_GEMM_COLUMNS = 64
"""DeepGEMM takes N in multiples of this (vLLM's `should_use_deepgemm_for_fp8_linear`)."""

PROBED_ROWS = (1, 16, 64, 128, 256, 1024)
"""DeepGEMM: row counts whose bits the start-up probe holds against those of LARGEST_ROWS."""

LARGEST_ROWS = 4096

_FILES = {
    "reference": ("reference.py",),
    "triton": ("triton.py",),
    "deep_gemm": ("deep_gemm.py",),
}
_SHARED = {
    "reference": ("linear/tiles.py",),
    "triton": ("alignment.py",),
    "deep_gemm": ("linear/deep_gemm.py", "alignment.py", "vendored.py"),
}

IMPLEMENTATIONS = tuple(_FILES)


def quantization_of(impl: str) -> str:
    """Return the implementation of `quantization` that feeds `impl`."""
    return "reference" if impl == "reference" else "triton"


def choose(device_type: str, arch: str | None = None, facts: ModelFacts | None = None) -> str:
    """Return the implementation for a device; DeepGEMM on Hopper and Blackwell.

    Args:
        device_type: "cpu" or "cuda".
        arch: for "cuda", e.g. "sm_90".
        facts: of the model: on Blackwell DeepGEMM reads power-of-two scales alone.
    """
    if device_type != "cuda":
        return "reference"
    ue8m0 = facts is not None and facts.scale_format == "ue8m0"
    return "deep_gemm" if arch == "sm_90" or (arch == "sm_100" and ue8m0) else "triton"


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference", "triton" or "deep_gemm").

    Raises:
        MissingBinaryError: "deep_gemm" where vLLM's CUDA wheel or nvcc is missing.
    """
    source = source_sha256("fp8_linear", "spec.py", *_FILES[impl], shared=_SHARED[impl])
    return Program(impl, source, _schedule(impl))


def _schedule(impl: str) -> dict[str, Scalar]:
    if impl == "triton":
        tile = {"tile_m": TILE_M, "tile_n": TILE_N, "num_warps": NUM_WARPS}
        return {**tile, "num_stages": NUM_STAGES, "promotion": "multiply, then add"}
    if impl == "deep_gemm":
        from consistent_kernels import vendored

        return {
            "library_sha256": vendored.find_binary("deep_gemm").sha256,
            "kernels_sha256": vendored.find_binary("deep_gemm_include").sha256,
            "compiler": vendored.deep_gemm_compiler(),
        }
    from consistent_kernels.linear import spec as linear

    # The GEMM of one block is the reference linear's; its sources and its bits count too.
    return {"promotion": "multiply, then add", **linear.program("reference").schedule}
