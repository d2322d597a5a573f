"""What the compressor computes, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

GROUP = 8
"""Tokens of one tree of the sum; trees are added in ascending order."""

SPEC = OpSpec(
    op="compressor",
    version=1,
    fields={
        "state": "kv and score + position_bias[position % ratio], fp32, a token",
        "entry": "c = sum_j kv_j exp(s_j - max s) / sum_j exp(s_j - max s), per column, fp32",
        "tokens": "ascending; with overlap the window before in the first series, then its own "
        "window in the second; a token before the first counts for nothing",
        "sum": f"halving trees of {GROUP} tokens, added in ascending order",
        "norm": "c / sqrt(mean(c^2) + eps) * weight, fp32, not rounded before the rotation",
        "rotation": "adjacent pairs of the last rotary_dim columns, at the window's first position",
        "rounding": "once, to the model dtype",
        "no_token": "an entry of -1 only is zero",
    },
)

COLUMNS_PER_WARP = 64
"""Triton: a warp's columns, two a thread, so that one thread holds all tokens of its columns.

Warps side by side on other tokens send every level of the trees through shared memory: at 128
columns on four warps the compiler put whole entries into local memory (4 KB a thread)."""


def num_warps(columns: int) -> int:
    """Return the warps of one program that forms `columns` (a power of two) columns."""
    return min(max(columns // COLUMNS_PER_WARP, 1), 8)


_SCHEDULES = {
    "reference": (("reference.py", "windows.py"), {"tree": "halving"}),
    "triton": (
        ("triton.py", "windows.py"),
        {"tree": "halving", "columns_per_warp": COLUMNS_PER_WARP, "contraction": False},
    ),
}
_SHARED = {
    "reference": ("tree.py", "rotary/tables.py"),
    "triton": (
        "triton_tree.py",
        "alignment.py",
        "rotary/tables.py",
        "kv_cache_fp8/triton.py",
        "kv_cache_fp8/layout.py",
    ),
}

IMPLEMENTATIONS = tuple(_SCHEDULES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference" or "triton")."""
    files, schedule = _SCHEDULES[impl]
    source = source_sha256("compressor", "spec.py", *files, shared=_SHARED[impl])
    return Program(impl, source, schedule)
