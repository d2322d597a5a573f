"""What a linear layer computes, and the pinned schedule of each implementation."""

import dataclasses

import torch

from consistent_kernels.contract import OpSpec, Program, Scalar
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

TILE_ROWS, TILE_COLUMNS = 16, 64
"""CPU: shape of one fp32 GEMM; a library picks its kernel by shape, so the shape is fixed."""


@dataclasses.dataclass(frozen=True)
class TritonTile:
    """One launch configuration of the Triton program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


BASE_TILE = TritonTile(64, 128, 64, 4, 4)
"""The Triton program. Another tile runs only where a probe found the bits of this one."""

TILES_BY_ROWS = (
    (16, TritonTile(16, 64, 128, 4, 5)),
    (64, TritonTile(64, 64, 128, 4, 4)),
    (256, BASE_TILE),
    (2048, TritonTile(128, 128, 64, 8, 4)),
    (0, TritonTile(128, 256, 64, 8, 4)),
)
"""(rows up to which a tile is used, tile), ascending; 0 stands for any number of rows.

Fastest of 14 tiles on an H200 at N=6144 and 151936, K=4096.
"""

GROUP_ROWS = 8
"""Row blocks that share a pass over the weights; a launch order, which moves no bits."""

_FILES = {
    "reference": ("reference.py", "tiles.py"),
    "onednn": ("onednn.py", "packing.py", "reference.py", "tiles.py"),
    "triton": ("triton.py",),
    "deep_gemm": ("deep_gemm.py", "triton.py"),
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
    from consistent_kernels.linear.onednn import native_bf16

    return "reference" if native_bf16() is None else "onednn"


def program(impl: str) -> Program:
    """Return the program of `impl`, one of IMPLEMENTATIONS.

    Raises:
        MissingBinaryError: "deep_gemm" where vLLM's CUDA wheel or nvcc is not installed.
    """
    shared = ("alignment.py",) if impl in ("triton", "deep_gemm") else ()
    source = source_sha256("linear", "spec.py", *_FILES[impl], shared=shared)
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
    # Imported here: both files read the constants above.
    from consistent_kernels.linear import onednn, probe, tiles

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
