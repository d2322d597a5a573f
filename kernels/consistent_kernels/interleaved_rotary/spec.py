"""What interleaved rotary computes, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="interleaved_rotary",
    version=1,
    fields={
        "formula": "y[2i] = round(x[2i] cos - x[2i+1] sin), "
        "y[2i+1] = round(x[2i+1] cos + x[2i] sin)",
        "columns": "the last rotary_dim of a head; the others are copied",
        "inverse": "by the opposite angle",
        "tables": "as rotary",
        "accumulate": "fp32",
        "rounding": "once, to the dtype of x",
    },
)

HEADS = 8
"""Triton: heads of one program."""

NUM_WARPS = 4

_SCHEDULES = {
    "reference": (("reference.py",), {"form": "elementwise"}),
    "triton": (("triton.py",), {"form": "elementwise", "num_warps": NUM_WARPS}),
}
_SHARED = {
    "reference": ("rotary/tables.py",),
    "triton": ("rotary/tables.py", "alignment.py"),
}

IMPLEMENTATIONS = tuple(_SCHEDULES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference" or "triton")."""
    files, schedule = _SCHEDULES[impl]
    source = source_sha256("interleaved_rotary", "spec.py", *files, shared=_SHARED[impl])
    return Program(impl, source, schedule)
