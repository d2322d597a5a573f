"""What a grouped linear computes, and the pinned schedule of each implementation."""

import dataclasses

from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.linear.schedule import TritonTile
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

BASE_TILE = TritonTile(64, 64, 64, 4, 3)
"""The Triton program. Another tile runs only where a probe found the bits of this one."""

TILES_BY_ROWS = (
    (64, TritonTile(64, 64, 128, 4, 4)),
    (0, TritonTile(128, 128, 64, 8, 4)),
)
"""(rows up to which a tile is used, tile), for elements of two bytes; 0 stands for any number.

Few rows: each program keeps 48 KB of weights on their way. More: fewer programs read a weight.
"""

_SCHEDULES = {
    "reference": (("api.py",), {"gemm": "the linear reference, group by group"}),
    "triton": (
        ("triton.py",),
        {f"tile.{key}": value for key, value in dataclasses.asdict(BASE_TILE).items()},
    ),
}
_SHARED = {
    "reference": ("linear/reference.py", "linear/tiles.py"),
    "triton": ("alignment.py", "linear/probe.py"),
}

IMPLEMENTATIONS = tuple(_SCHEDULES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference" or "triton")."""
    files, schedule = _SCHEDULES[impl]
    source = source_sha256("grouped_linear", "spec.py", *files, shared=_SHARED[impl])
    return Program(impl, source, schedule)
