"""What the index scores are, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program, Scalar
from consistent_kernels.program_source import source_sha256

HEAD_DIM = 128
"""Of every published indexer; one FP8 scale a key covers it."""

SPEC = OpSpec(
    op="indexer",
    version=2,
    fields={
        "formula": "score = s_k * sum_h w_h * relu(q_h . k)",
        "dot": "128 products of e4m3, fp32",
        "relu": "dot where dot > 0, else +0.0; a NaN dot counts as 0",
        "head_sum": "products w_h * relu in fp32; the order is the program's",
        "key_scale": "fp32, after the heads or after parts of them, as the program adds them",
        "q": "e4m3, a scale per query and head: 2^ceil(log2(max(amax / 448, 1e-10)))",
        "w": "((w * s_q) * softmax_scale) * head_scale, fp32, in this order",
        "k": "kv_cache_fp8, layout indexer",
        "backward": "none: no gradient flows into the indexer",
    },
)
"""Version 1 stated another floor of q's scale than was computed; no bit moved."""

KEY_TILE = 128
"""Triton: keys of one product."""

TILES = 4
"""Triton: key tiles that a program walks where there is work for all processors; a power of two."""

MIN_PROGRAMS = 264
"""Triton: programs below which each walks fewer tiles: two for each multiprocessor of an H200."""

NUM_WARPS = 4

_FILES = {
    "reference": ("reference.py",),
    "triton": ("triton.py",),
    "deep_gemm": ("deep_gemm.py",),
}
_SHARED = {
    "reference": ("tree.py",),
    "triton": ("triton_tree.py", "alignment.py"),
    "deep_gemm": ("vendored.py",),
}

IMPLEMENTATIONS = tuple(_FILES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference", "triton" or "deep_gemm").

    Raises:
        MissingBinaryError: "deep_gemm" where vLLM's CUDA wheel or nvcc is missing.
    """
    source = source_sha256("indexer", "spec.py", "layout.py", *_FILES[impl], shared=_SHARED[impl])
    return Program(impl, source, _schedule(impl))


def _schedule(impl: str) -> dict[str, Scalar]:
    if impl == "reference":
        return {"dot": "exact in fp64, rounded once", "head_sum": "halving tree"}
    if impl == "triton":
        return {
            "dot": "one tensor-core product over 128 dimensions",
            "head_sum": "halving tree",
            "key_tile": KEY_TILE,
            "num_warps": NUM_WARPS,
            "contraction": False,
        }
    from consistent_kernels import vendored

    return {
        "head_sum": "DeepGEMM's: four lanes, each times the key's scale, added pairwise",
        "library_sha256": vendored.find_binary("deep_gemm").sha256,
        "kernels_sha256": vendored.find_binary("deep_gemm_include").sha256,
        "compiler": vendored.deep_gemm_compiler(),
    }
