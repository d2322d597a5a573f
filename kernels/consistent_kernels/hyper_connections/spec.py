"""What the hyper-connection maps compute, and the pinned schedule of each implementation."""

import dataclasses

from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="hyper_connections",
    version=1,
    fields={
        "mixes": "m = (x fn^T) / sqrt(mean(x^2) + norm_eps) over all streams of a token, fp32",
        "split": "none that follows the batch: K is cut at fixed columns only",
        "pre": "sigmoid(m scale[0] + base) + eps",
        "post": "sigmoid(m scale[1] + base) * post_multiplier",
        "comb": "softmax over the last index of (m scale[2] + base), plus eps, then Sinkhorn",
        "sinkhorn": "columns, then (iterations - 1) times rows and columns: c / (sum + eps), fp32",
        "layer_input": "sum over streams of pre_i x_i, fp32, one rounding",
        "post_map": "post_j y + sum over i, ascending, of comb_ij x_i, fp32, one rounding",
        "small_sums": "halving tree over the streams, but for post_map",
    },
)

ROW_TILE = 64
"""Triton: tokens of one GEMM instruction, the same for 1 token and 4096."""

K_PART = 128
"""Triton: columns of one partial sum, multiplied by one `tl.dot` for each term of fn."""

RUN_PARTS = 4
SPAN_RUNS = 8
"""Triton: parts are added in ascending order within a run, runs in ascending order within a span,
spans in a halving tree. A program takes a part, a run or a span, and the map kernel adds the rest:
the additions are the same. So few tokens use the whole device, and many do not write and read all
parts."""


@dataclasses.dataclass(frozen=True)
class MixSchedule:
    """How the mix kernel runs; moves no bit.

    Attributes:
        parts: consecutive parts that a program adds: 1, RUN_PARTS or RUN_PARTS * SPAN_RUNS.
        early: whether the map kernel may start beside it before its loop, not behind it.
    """

    parts: int
    row_tile: int = ROW_TILE
    warps: int = 4
    stages: int = 3
    early: bool = True


@dataclasses.dataclass(frozen=True)
class MapSchedule:
    """How the map kernel runs; moves no bit.

    Attributes:
        hidden_block: columns of the layer input of one program; all S streams of them.
        comb_tokens: tokens of one program of comb; these programs start before the others.
        overlap: launched while the mix kernel runs (sm_90 and later); waits before it reads mixes.
        registers: that a thread may have, where the compiler's choice has it load some sums after
            it has added others; 0 leaves it to the compiler.
    """

    hidden_block: int = 512
    warps: int = 1
    comb_tokens: int = 1
    overlap: bool = True
    registers: int = 0


@dataclasses.dataclass(frozen=True)
class PostSchedule:
    """How the post kernel runs; moves no bit."""

    hidden_block: int = 512
    warps: int = 1


_NARROW = 32
"""Mixes up to which the stages of a pipeline fit into shared memory (8 streams: 80 mixes)."""

_FEW = 16
"""Mixes up to which fn is little work beside x (the head: 4)."""


_FOUR_STREAMS = (4, 24)
"""Mixes of four streams (head, pre): 128 registers hold a token's sums of parts and its x."""


def mix_schedule(tokens: int, mixes: int, hopper: bool) -> MixSchedule:
    """Return the schedule of a batch for fn of so many rows, as `benchmarks.schedules` found it.

    Args:
        hopper: whether two warp groups may share a tile of 128 tokens: there they run the same
            instruction of 64 rows. Elsewhere a tile has ROW_TILE tokens.
    """
    parts = RUN_PARTS * SPAN_RUNS
    if _of_single_parts(tokens, mixes):
        parts = 1
    elif tokens <= 16 * ROW_TILE:
        parts = RUN_PARTS
    if mixes > _NARROW:
        return MixSchedule(parts, warps=8, stages=1)
    # The map kernel's programs wait on the device, and many of them are in the mix kernel's way.
    early = parts == 1 and (mixes <= _FEW or tokens < ROW_TILE)
    wide = tokens >= 64 * ROW_TILE or (parts == 1 and tokens > 2 * ROW_TILE)
    if hopper and wide:
        return MixSchedule(parts, row_tile=2 * ROW_TILE, warps=8, early=early)
    return MixSchedule(parts, early=early)


def map_schedule(tokens: int, mixes: int) -> MapSchedule:
    """Return the schedule of a batch for fn of so many rows."""
    if tokens > 16 * ROW_TILE:
        return MapSchedule(comb_tokens=8)
    single = _of_single_parts(tokens, mixes)
    return MapSchedule(
        1024 if single and tokens > 2 * ROW_TILE else 512,
        registers=128 if single and mixes in _FOUR_STREAMS else 0,
    )


def _of_single_parts(tokens: int, mixes: int) -> bool:
    return tokens <= 2 * ROW_TILE or (mixes <= _FEW and tokens <= 4 * ROW_TILE)


def post_schedule(tokens: int) -> PostSchedule:
    """Return the schedule of a batch."""
    return PostSchedule(warps=1 if tokens <= 16 * ROW_TILE else 2)


_SHARED = {
    "reference": ("tree.py", "linear/reference.py", "linear/tiles.py"),
    "triton": ("triton_tree.py", "alignment.py"),
}
_SCHEDULES = {
    "reference": (("reference.py",), {"gemm": "fp32 linear reference", "tree": "halving"}),
    "triton": (
        ("triton.py", "triton_mix.py", "triton_maps.py", "triton_post.py"),
        {
            "gemm": "bf16 x times fn as three bf16 terms, fp32 accumulators, smallest term first",
            "row_tile": ROW_TILE,
            "k_part": K_PART,
            "run_parts": RUN_PARTS,
            "span_runs": SPAN_RUNS,
            "contraction": False,
        },
    ),
}

IMPLEMENTATIONS = tuple(_SCHEDULES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference" or "triton")."""
    files, schedule = _SCHEDULES[impl]
    source = source_sha256("hyper_connections", "spec.py", *files, shared=_SHARED[impl])
    return Program(impl, source, schedule)
