"""What embedding computes, and its one schedule."""

from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="embedding",
    version=1,
    fields={
        "formula": "y[t] = weight[ids[t]]",
        "weight": "master rounded to the model dtype, nearest even",
        "rounding": "none",
    },
)

# A gather moves bits and does no arithmetic, so both devices use the same PyTorch form.
IMPLEMENTATIONS = ("reference", "triton")


def program(impl: str) -> Program:
    """Return the program of `impl`; "triton" names the CUDA program, also PyTorch's gather."""
    return Program(impl, source_sha256("embedding", "spec.py", "reference.py"), {"form": "gather"})
