"""What silu_and_mul computes, and the pinned schedule of each implementation."""

from consistent_kernels import llvm
from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="silu_and_mul",
    version=1,
    fields={
        "formula": "y = round(gate / (1 + exp(-gate)) * up)",
        "accumulate": "fp32",
        "rounding": "once, to the dtype of gate",
    },
)

BLOCK = 1024
"""Triton: columns of a program, 16 bytes of bf16 a thread. Moves no bit."""

NUM_WARPS = 4

_SCHEDULES = {
    "reference": (("reference.py",), {"form": "exp and IEEE division, elementwise"}),
    "llvm": (("llvm.py",), {"form": "exp by a polynomial and IEEE division, elementwise"}),
    "triton": (("triton.py",), {"block": BLOCK, "num_warps": NUM_WARPS, "division": "rn"}),
}

_SHARED = {"llvm": llvm.SOURCES, "triton": ("alignment.py",)}

IMPLEMENTATIONS = tuple(_SCHEDULES)


def choose(device_type: str, arch: str | None = None, facts: object = None) -> str:
    """Return the implementation for a device; `arch` and `facts` are not read."""
    if device_type == "cuda":
        return "triton"
    return "llvm" if llvm.is_available() else "reference"


def program(impl: str) -> Program:
    """Return the program of `impl`, one of IMPLEMENTATIONS."""
    files, schedule = _SCHEDULES[impl]
    shared = _SHARED.get(impl, ())
    if impl == "llvm":
        schedule = schedule | llvm.identity()
    source = source_sha256("silu_and_mul", "spec.py", *files, shared=shared)
    return Program(impl, source, schedule)
