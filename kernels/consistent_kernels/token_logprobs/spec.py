"""What a token's log-prob is, and the pinned schedule of each implementation."""

from consistent_kernels import llvm
from consistent_kernels.contract import OpSpec, Program, float_bits
from consistent_kernels.program_source import source_sha256

VOCAB_TILE = 1024
"""Vocabulary entries of one partial result, counted from id 0; the last tile is padded with -inf.

A vocabulary cut at multiples of it (streaming, vocabulary parallel) gives the same partials.
"""

SMALLEST_DELTA = -128.0
"""exp of it is 0 in fp32, as is exp(-inf): clamping there changes no probability and keeps
0 * -inf out of the entropy."""

SPEC = OpSpec(
    op="token_logprobs",
    version=1,
    fields={
        "formula": "logprob = z[id] - logsumexp(z), z = logit / temperature",
        "logits": "fp32, the unrounded accumulator of lm_head",
        "temperature": "IEEE fp32 division; 0 (greedy) means 1",
        "masked": "ids >= valid_vocab and banned ids are -inf",
        "vocab_tile": VOCAB_TILE,
        "tile": "m = max z, s = sum exp(z - m), fp32, pairwise tree",
        "merge": "M = max m; S = sum of s * exp(m - M) over ascending tiles; M + log(S)",
        "entropy": "log(S) - W / S, W = sum exp(z - M) * (z - M) by the same tiles and merge",
        "smallest_delta": float_bits(SMALLEST_DELTA),
        "nonfinite": "NaN and +inf logits give a NaN log-prob",
    },
)

REFERENCE_ROWS = 16
"""Reference: rows reduced at once, 3 MB of logits at a vocabulary of 49152. Moves no bit."""

STREAM_ROWS = {"reference": 128, "llvm": 128, "triton": 512}
"""Rows whose logits exist at once when they come from hidden states: 300 MB for 512 rows at a
vocabulary of 151936. Rows are independent: it moves no bit."""

BACKWARD_ROWS = {"reference": 128, "llvm": 128, "triton": 4096}
"""As STREAM_ROWS in the backward, where each step also adds to a gradient of the weight's size."""

NUM_WARPS = 1
"""Triton: one warp a tile, 32 values a thread: the tree needs no barrier."""

_SCHEDULES = {
    "reference": (("reference.py",), {"tree": "halving", "exp": "aten"}),
    "llvm": (("llvm.py", "reference.py"), {"tree": "halving", "exp": "polynomial; merge: aten"}),
    "triton": (
        ("triton.py",),
        {"tree": "halving", "exp": "libdevice", "fp_fusion": False, "num_warps": NUM_WARPS},
    ),
}

IMPLEMENTATIONS = tuple(_SCHEDULES)


_SHARED = {"llvm": llvm.SOURCES, "triton": ("triton_tree.py",)}


def choose(device_type: str, arch: str | None = None, facts: object = None) -> str:
    """Return the implementation for a device; `arch` and `facts` are not read."""
    if device_type == "cuda":
        return "triton"
    return "llvm" if llvm.is_available() else "reference"


def program(impl: str) -> Program:
    """Return the program of `impl`, one of IMPLEMENTATIONS."""
    files, schedule = _SCHEDULES[impl]
    shared = _SHARED.get(impl, ())
    if impl == "llvm":
        schedule = schedule | llvm.identity()
    source = source_sha256("token_logprobs", "spec.py", *files, shared=shared)
    return Program(impl, source, schedule)
