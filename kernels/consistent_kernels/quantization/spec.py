"""What FP8 quantization computes, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program, float_bits
from consistent_kernels.program_source import source_sha256

GROUP = 128
"""Values of a row that share a scale; also the side of a weight's block."""

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""

MIN_AMAX = 1e-10
"""Smallest group maximum (vLLM's and verl's eps); what a group of zeros is scaled by."""

MIN_UE8M0_SCALE = 1e-10
"""Smallest scale before it is rounded up to a power of two, so the smallest is 2^-33 (vLLM)."""

FP8_NAN = 0x7F
"""The one NaN that is written; PTX's conversion gives it too."""

SCALE_FORMATS = ("fp32", "ue8m0")

SPEC = OpSpec(
    op="quantization",
    version=1,
    fields={
        "dtype": "float8_e4m3fn, round to nearest even, clamped to +-448 first",
        "group": GROUP,
        "rows": "a scale per row and 128 columns; the last group may be shorter",
        "blocks": "a scale per 128 rows and 128 columns; edge blocks may be smaller",
        "scale": "s = max(amax, min_amax) / 448, IEEE fp32 division",
        "ue8m0": "s = 2^ceil(log2(max(s, min_ue8m0_scale))) on the bits, before quantizing",
        "rows_value": "q = round(clamp(x / s)), IEEE fp32 division",
        "blocks_value": "q = round(clamp(x * (1 / s))), IEEE fp32 reciprocal",
        "fp8_max": float_bits(FP8_MAX),
        "min_amax": float_bits(MIN_AMAX),
        "min_ue8m0_scale": float_bits(MIN_UE8M0_SCALE),
        "nonfinite": "a group that holds NaN or infinity: s = 0x7fc00000, every q = 0x7f",
        "zeros": "s = min_amax / 448 (2^-33 for ue8m0); q keeps the sign of zero",
        "weight": "master rounded to the model dtype, nearest even, then blocks",
    },
)

_FILES = {"reference": ("reference.py",), "triton": ("triton.py",)}

IMPLEMENTATIONS = tuple(_FILES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference" or "triton"); both give the same bits."""
    shared = ("alignment.py",) if impl == "triton" else ()
    source = source_sha256("quantization", "spec.py", *_FILES[impl], shared=shared)
    return Program(impl, source, {"division": "ieee", "contraction": False})
