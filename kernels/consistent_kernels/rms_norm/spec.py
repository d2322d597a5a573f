"""What RMSNorm computes, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="rms_norm",
    version=1,
    fields={
        "formula": "y = round(x * (1 / sqrt(mean(x^2) + eps)) * w)",
        "accumulate": "fp32",
        "residual": "s = round(x + residual), then s is squared",
        "rounding": "once, after the weight, to the dtype of x",
        "eps": "fp32",
    },
)

LANES = 256
"""Triton: columns LANES apart are added in ascending order, then the lanes by a halving tree."""

NUM_WARPS = 1
"""Triton: one warp a row, so that the tree needs no barrier."""

WIDE_ROW, WIDE_NUM_WARPS = 4096, 4
"""Triton: longer rows than WIDE_ROW do not fit one warp's registers. Warps move no bit."""

_SCHEDULES = {
    "reference": (("reference.py", "loops.py"), {"tree": "halving, zero-padded to a power of two"}),
    "triton": (
        ("triton.py",),
        {
            "tree": "lanes ascending, then halving",
            "lanes": LANES,
            "contraction": False,
            "num_warps": NUM_WARPS,
        },
    ),
}
_SHARED = {"reference": (), "triton": ("triton_tree.py", "alignment.py")}

IMPLEMENTATIONS = tuple(_SCHEDULES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference" or "triton")."""
    files, schedule = _SCHEDULES[impl]
    source = source_sha256("rms_norm", "spec.py", *files, shared=_SHARED[impl])
    return Program(impl, source, schedule)
