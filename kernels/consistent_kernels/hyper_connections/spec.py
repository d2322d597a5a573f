"""What the hyper-connection maps compute, and the pinned schedule of each implementation."""

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
"""Triton: tokens of one GEMM program; the same instruction serves 1 token and 4096."""

K_PART = 512
"""Triton: columns of one partial sum. Cuts lie at multiples of it whatever the number of tokens,
and parts are added in a halving tree, so that few tokens still use the whole device."""

K_STEP = 64
"""Triton: columns of one GEMM step inside a part, ascending."""

HIDDEN_BLOCK = 512
"""Triton: columns of one program of the elementwise maps."""

MIX_WARPS = 4
MAP_WARPS = 1

_SHARED = {
    "reference": ("tree.py", "linear/reference.py", "linear/tiles.py"),
    "triton": ("triton_tree.py", "alignment.py"),
}
_SCHEDULES = {
    "reference": (("reference.py",), {"gemm": "fp32 linear reference", "tree": "halving"}),
    "triton": (
        ("triton.py",),
        {
            "gemm": "bf16 x times fn as three bf16 terms, fp32 accumulators, smallest term first",
            "row_tile": ROW_TILE,
            "k_part": K_PART,
            "k_step": K_STEP,
            "mix_warps": MIX_WARPS,
            "map_warps": MAP_WARPS,
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
