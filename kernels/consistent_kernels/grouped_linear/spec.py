"""What a grouped linear computes, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="grouped_linear",
    version=1,
    fields={
        "formula": "y[t, g] = round(sum_k x[t, g, k] * w[g, n, k])",
        "accumulate": "fp32",
        "rounding": "once, to the dtype of x",
    },
)

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_K = 64, 64, 64
NUM_WARPS, NUM_STAGES = 4, 3
"""Triton: one tile for all numbers of rows; the grid has a dimension of groups."""

_SCHEDULES = {
    "reference": (("api.py",), {"gemm": "the linear reference, group by group"}),
    "triton": (
        ("triton.py",),
        {
            "tile": f"{BLOCK_ROWS}x{BLOCK_COLUMNS}x{BLOCK_K}",
            "num_warps": NUM_WARPS,
            "num_stages": NUM_STAGES,
        },
    ),
}
_SHARED = {
    "reference": ("linear/reference.py", "linear/tiles.py"),
    "triton": ("alignment.py",),
}

IMPLEMENTATIONS = tuple(_SCHEDULES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference" or "triton")."""
    files, schedule = _SCHEDULES[impl]
    source = source_sha256("grouped_linear", "spec.py", *files, shared=_SHARED[impl])
    return Program(impl, source, schedule)
