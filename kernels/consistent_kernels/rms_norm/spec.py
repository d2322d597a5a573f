"""What RMSNorm computes, and the pinned schedule of each implementation."""

import functools

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

NUM_WARPS = {1024: 1, 4096: 4, None: 8}
"""Triton: warps of a row of up to so many columns. A short row's tree needs no barrier with one; a
longer row and its weights would not fit one warp's registers. Warps move no bit."""

_SCHEDULES = {
    "reference": (("reference.py", "loops.py"), {"tree": "halving, zero-padded to a power of two"}),
    "triton": (
        ("triton.py",),
        {
            "tree": "lanes ascending, then halving",
            "lanes": LANES,
            "contraction": False,
            "num_warps": ", ".join(f"{warps} to {size}" for size, warps in NUM_WARPS.items()),
        },
    ),
}
_SHARED = {"reference": (), "triton": ("triton_tree.py", "alignment.py")}

IMPLEMENTATIONS = tuple(_SCHEDULES)


@functools.cache
def num_warps(columns: int) -> int:
    """Return the warps of a row in Triton."""
    return next(w for limit, w in NUM_WARPS.items() if limit is None or columns <= limit)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference" or "triton")."""
    files, schedule = _SCHEDULES[impl]
    source = source_sha256("rms_norm", "spec.py", *files, shared=_SHARED[impl])
    return Program(impl, source, schedule)
