"""What the experts compute, and the pinned schedule of each implementation."""

import dataclasses

from consistent_kernels.contract import OpSpec, Program, Scalar
from consistent_kernels.linear.onednn import native_bf16
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="experts",
    version=1,
    fields={
        "formula": "y[t] = sum_k w[t, k] * down_e(silu(gate_e(x[t])) * up_e(x[t])) + shared[t]",
        "weight": "master rounded to the model dtype, nearest even; gate rows, then up rows",
        "accumulate": "fp32 over ascending K in every GEMM",
        "gate_up": "rounded to the model dtype",
        "clamp": "where the model has one: gate <= limit, |up| <= limit, in fp32",
        "activation": "gate / (1 + exp(-gate)) * up in fp32, rounded once to the model dtype",
        "down": "rounded to the model dtype, unweighted",
        "combine": "fp32 products and sums in slot order from +0, no contraction, then the shared "
        "expert's result, one rounding",
        "nowhere": "a slot of id -1 adds nothing",
    },
)


@dataclasses.dataclass(frozen=True)
class GroupedTile:
    """One launch configuration of the grouped GEMM.

    `block_n` counts rows of the weight: half of them are gate, half up, where a tile makes both.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def columns(self, gated: bool) -> int:
        """Columns of the result that a tile makes."""
        return self.block_n // 2 if gated else self.block_n


BASE_TILE = GroupedTile(64, 128, 64, 4, 3)
"""The Triton program. Another tile runs only where a probe found the bits of this one."""

TILES_BY_ROWS = (
    (8, GroupedTile(16, 128, 128, 4, 3)),
    (24, GroupedTile(32, 128, 128, 4, 3)),
    (48, BASE_TILE),
    (0, GroupedTile(128, 256, 64, 8, 4)),
)
"""(mean rows of an expert up to which a tile is used, tile), ascending; 0 stands for any number.

Sizes as in vLLM's table for 128 experts of width 768 on an H200 (fused_moe/configs).
"""

SORT_BLOCKS = ((8192, 1024, 4), (0, 4096, 8))
"""(rows up to which it is used, rows read at once, warps): integers, which no bit follows."""

COMBINE_BLOCK = 512
NUM_WARPS = 4

LAYOUTS = ("contiguous", "masked", "fastest")
"""Rows sorted by expert, or [E, capacity] with the first rows of each in use; or whichever of the
two the implementation prefers for so many rows (no bit shows which)."""

_FILES = {
    "reference": ("reference.py",),
    "onednn": ("reference.py",),
    "triton": ("triton.py", "triton_activation.py", "triton_layout.py"),
    "deep_gemm": (
        "deep_gemm.py",
        "deep_gemm_grouped.py",
        "deep_gemm_places.py",
        "deep_gemm_rows.py",
        "triton.py",
        "triton_activation.py",
        "triton_layout.py",
    ),
}
IMPLEMENTATIONS = tuple(_FILES)


def choose(device_type: str, arch: str | None = None, facts: object = None) -> str:
    """Return the implementation for a device.

    On an H200 "triton" takes 0.96 and 0.94 of stock's time at 64 and 256 tokens of the
    Qwen3-30B-A3B shape and 1.08 at 4,096, "deep_gemm" 1.10, 1.05 and 1.27
    (benchmarks/results/ops_h200.json), so the second is taken by name only.

    Args:
        device_type: "cpu" or "cuda".
        arch: not read; Triton serves every one.
        facts: not read; every model shape is served.
    """
    if device_type != "cuda":
        # Plain weights, expert by expert: `linear`'s own GEMM would lay them out at each call.
        return "reference" if native_bf16() is None else "onednn"
    return "triton"


def program(impl: str) -> Program:
    """Return the program of `impl`, one of IMPLEMENTATIONS.

    Raises:
        MissingBinaryError: "deep_gemm" where vLLM's CUDA wheel or nvcc is not installed.
    """
    shared = ("alignment.py",) if impl in ("triton", "deep_gemm") else ()
    source = source_sha256("experts", "spec.py", *_FILES[impl], shared=shared)
    return Program(impl, source, _schedule(impl))


def _schedule(impl: str) -> dict[str, Scalar]:
    if impl == "triton":
        return dataclasses.asdict(BASE_TILE) | {"contraction": False}
    # Imported here: the CPU programs are calls of `linear`'s, expert by expert.
    from consistent_kernels.linear import spec as linear

    if impl == "deep_gemm":
        # Layers of a size that the library does not take run the Triton kernel.
        own = {f"triton.{key}": value for key, value in dataclasses.asdict(BASE_TILE).items()}
        binaries = ("library_sha256", "headers_sha256", "compiler")
        theirs = linear.program(impl).schedule
        return own | {"contraction": False} | {name: theirs[name] for name in binaries}
    return {"gemm": "linear, expert by expert", "linear": linear.program(impl).source_sha256}
