"""What the router computes, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program, float_bits
from consistent_kernels.program_source import source_sha256

DENOMINATOR_FLOOR = 1e-20
"""Added to the sum of the chosen scores, as DeepSeek's code does; no bit changes above 1e-12."""

SPEC = OpSpec(
    op="router",
    version=1,
    fields={
        "logits": "linear of the model dtype with fp32 result",
        "softmax": "exp(l - max) / sum exp(l - max)",
        "sigmoid": "1 / (1 + exp(-l))",
        "sqrtsoftplus": "sqrt(max(l, 0) + log1p(exp(-|l|)))",
        "choice": "score + correction bias; NaN chooses as -inf, -0 as +0",
        "group_score": "the two largest choices added, with a bias; the largest without",
        "ties": "lower group, lower expert id",
        "order": "slots by descending choice",
        "weight": "score / (sum over slots in ascending order + floor) * scale",
        "denominator_floor": float_bits(DENOMINATOR_FLOOR),
        "hash": "given expert ids, scores without bias, no groups",
        "invalid_rows": "id -1, weight +0",
        "accumulate": "fp32",
    },
)

NUM_WARPS = 1
"""Triton: one warp a token; the sum is a written-down tree, the choice is on integers."""

_SCHEDULES = {
    "reference": (("reference.py",), {"tree": "halving, zero-padded to a power of two"}),
    "triton": (
        ("triton.py",),
        {
            "tree": "halving, zero-padded to a power of two",
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
    source = source_sha256("router", "spec.py", "parameters.py", *files, shared=_SHARED[impl])
    return Program(impl, source, schedule)
