"""What the FP8 caches hold and return, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program, float_bits
from consistent_kernels.program_source import source_sha256

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""

MIN_AMAX = 1e-4
"""Smallest group maximum of V4 and of the indexer, as in vLLM."""

MIN_NORMAL = 2.0**-126
"""Smallest scale of V3.2: FLT_MIN, as in vLLM."""

GATHER_WARPS = 4
"""Triton: warps of a program that gathers."""

GATHER_VALUES = 8
"""Triton: FP8 values of a group in one thread of a gather: 8 bytes to load, 16 to store.

So no value changes threads between the two; 16 values take half the loads, and shared memory."""

GATHER_VALUES_V4 = 16
"""Triton: the same of V4, whose groups are half as wide (64 queries: 20.1 against 20.9 us)."""

GATHER_DESCENDING = True
"""Triton: last entries first, so that those which the attention reads first are still in L2 (V4,
256 queries, gather and attention: 137.6 against 141.2 us; loads that leave L2 first: 144.1)."""

SPEC = OpSpec(
    op="kv_cache_fp8",
    version=1,
    fields={
        "dtype": "float8_e4m3fn, round to nearest even, saturating",
        "amax": "largest magnitude of the group, NaN left out",
        "v32": "512 values, groups of 128, s = max(amax / 448, min_normal) fp32; 64 bf16 kept",
        "v4": "448 values, groups of 64, s = 2^ceil(log2(max(amax, min_amax) / 448)); 64 bf16 kept",
        "indexer_fp32": "128 values, s = max(amax, min_amax) / 448 fp32",
        "indexer_ue8m0": "the same, rounded up to a power of two, stored as fp32",
        "value": "q = round(clamp(x / s)), IEEE fp32 division; NaN is 0x7f",
        "read": "round(q * s) to bf16, one fp32 product, one rounding; NaN is 0x7fc0",
        "min_amax": float_bits(MIN_AMAX),
        "min_normal": float_bits(MIN_NORMAL),
        "absent": "position -1 reads as zeros",
        "backward": "straight-through onto the unquantized row",
    },
)

_FILES = {
    "reference": ("reference.py", "layout.py"),
    "triton": ("triton.py", "layout.py"),
    "cuda": ("cuda.py", "gather.cu", "triton.py", "layout.py"),
}
_SHARED = {"cuda": ("nvrtc.py",)}

IMPLEMENTATIONS = tuple(_FILES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference", "triton", "cuda"); all give the same bits."""
    shared = _SHARED.get(impl, ())
    source = source_sha256("kv_cache_fp8", "spec.py", *_FILES[impl], shared=shared)
    return Program(impl, source, {"division": "ieee", "contraction": False})
