"""What a linear layer computes, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program
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

TILE_ROWS = 16
"""Reference: rows of one GEMM call; a library GEMM picks its kernel by shape, so it is fixed."""

BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64
NUM_WARPS, NUM_STAGES = 4, 3
"""Triton: one tile for every M. BLOCK_K and the instruction that BLOCK_M selects move bits."""

_SCHEDULES = {
    "reference": (("reference.py",), {"tile_rows": TILE_ROWS, "gemm": "fp32 torch.mm"}),
    "triton": (
        ("triton.py",),
        {
            "block_m": BLOCK_M,
            "block_n": BLOCK_N,
            "block_k": BLOCK_K,
            "num_warps": NUM_WARPS,
            "num_stages": NUM_STAGES,
        },
    ),
}

IMPLEMENTATIONS = tuple(_SCHEDULES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference" or "triton")."""
    files, schedule = _SCHEDULES[impl]
    return Program(impl, source_sha256("linear", "spec.py", *files), schedule)
