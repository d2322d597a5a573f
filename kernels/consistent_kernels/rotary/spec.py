"""What rotary computes, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="rotary",
    version=1,
    fields={
        "formula": "y1 = round(x1 cos - x2 sin), y2 = round(x2 cos + x1 sin), halves (neox style)",
        "angle": "round_fp32(position * inv_freq)",
        "tables": "cos and sin of the fp32 angle in fp64, times attention_factor, rounded to fp32",
        "accumulate": "fp32",
        "rounding": "once, to the dtype of x",
        "beyond_rotary_dim": "copied",
    },
)

NUM_WARPS = 4
HEADS_PER_PROGRAM = 16
"""Triton: heads of a token that a program rotates; elementwise, so it moves no bit."""

_SCHEDULES = {
    "reference": (("reference.py", "loops.py", "tables.py"), {"form": "elementwise"}),
    "triton": (
        ("triton.py", "tables.py"),
        {"form": "elementwise", "contraction": False, "num_warps": NUM_WARPS},
    ),
}

IMPLEMENTATIONS = tuple(_SCHEDULES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference" or "triton")."""
    files, schedule = _SCHEDULES[impl]
    shared = ("alignment.py", "triton_tree.py") if impl == "triton" else ()
    source = source_sha256("rotary", "spec.py", *files, shared=shared)
    return Program(impl, source, schedule)
