"""What a linear layer computes, and the pinned schedule of each implementation."""

import dataclasses

import torch

from consistent_kernels import llvm
from consistent_kernels.contract import OpSpec, Program, Scalar
from consistent_kernels.linear import onednn, probe, tiles
from consistent_kernels.linear.schedule import BASE_TILE, TILE_COLUMNS, TILE_ROWS
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="linear",
    version=1,
    fields={
        "formula": "y = round(sum_k x[k] * w[n, k] + b[n])",
        "weight": "master rounded to the model dtype, nearest even",
        "accumulate": "fp32",
        "bias": "added in fp32, before the rounding",
        "rounding": "once, to the dtype of x, or none where the output is fp32 (lm_head)",
    },
)

_FILES = {
    "reference": ("reference.py", "tiles.py"),
    "llvm": ("llvm.py",),
    "onednn": ("onednn.py", "packing.py", "reference.py", "tiles.py"),
    "triton": ("triton.py", "triton_kernel.py"),
    "deep_gemm": ("deep_gemm.py", "triton.py", "triton_kernel.py"),
}

IMPLEMENTATIONS = tuple(_FILES)


DEEP_GEMM_ARCHITECTURES = ("sm_90", "sm_100")
"""Where DeepGEMM has BF16 kernels (WGMMA, tcgen05)."""


def choose(device_type: str, arch: str | None = None, facts: object = None) -> str:
    """Return the implementation for a device; on CPU it follows the instruction set.

    Args:
        device_type: "cpu" or "cuda".
        arch: for "cuda", e.g. "sm_90".
        facts: not read; every model shape is served.
    """
    if device_type == "cuda":
        return "deep_gemm" if arch in DEEP_GEMM_ARCHITECTURES else "triton"
    if onednn.native_bf16() == "amx":
        # Tiles of 16 x 16 products: no loop over vectors comes near.
        return "onednn"
    if llvm.is_available():
        return "llvm"
    return "reference" if onednn.native_bf16() is None else "onednn"


def program(impl: str) -> Program:
    """Return the program of `impl`, one of IMPLEMENTATIONS.

    Raises:
        MissingBinaryError: "deep_gemm" where vLLM's CUDA wheel or nvcc is not installed.
    """
    shared = ("alignment.py",) if impl in ("triton", "deep_gemm") else ()
    shared = llvm.SOURCES if impl == "llvm" else shared
    shared = ("cpu_gemm.py",) if impl in ("reference", "onednn") else shared
    source = source_sha256("linear", "spec.py", "schedule.py", *_FILES[impl], shared=shared)
    return Program(impl, source, _schedule(impl))


def _schedule(impl: str) -> dict[str, Scalar]:
    if impl == "triton":
        return dataclasses.asdict(BASE_TILE)
    if impl == "deep_gemm":
        from consistent_kernels import vendored

        # Layers with a bias, or of a shape that TMA cannot address, run the Triton kernel.
        return {f"triton.{key}": value for key, value in dataclasses.asdict(BASE_TILE).items()} | {
            "library_sha256": vendored.find_binary("deep_gemm").sha256,
            "headers_sha256": vendored.find_binary("deep_gemm_include").sha256,
            "compiler": vendored.deep_gemm_compiler(),
        }
    if impl == "llvm":
        return {"inner": "ascending, one fp32 accumulator an element"} | llvm.identity()
    schedule: dict[str, Scalar] = {
        "tile_rows": TILE_ROWS,
        "tile_columns": TILE_COLUMNS,
        "fp32_gemm": "torch.bmm",
        "fp32_witness": probe.witness(tiles.multiply_fp32, torch.float32),
    }
    if impl == "onednn":
        schedule["bf16_gemm"] = "torch.mm"
        schedule["bf16_instructions"] = onednn.native_bf16()
        schedule["bf16_witness"] = probe.witness(onednn.multiply_bf16, torch.bfloat16)
    return schedule
