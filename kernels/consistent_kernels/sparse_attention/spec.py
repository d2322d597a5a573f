"""What sparse attention computes, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

ENTRY_TILE = 64
"""Entries of one step of the online softmax, counted from the first column of the indices."""

SPEC = OpSpec(
    op="sparse_attention",
    version=1,
    fields={
        "formula": "out = sum_j p_j v_j over the entries j that a query's row of indices names",
        "order": "as given; -1 names nothing; an entry named twice counts twice",
        "values": "the first d_v columns of an entry",
        "scores": "fp32 dot product, times scale in fp32",
        "softmax": f"online over tiles of {ENTRY_TILE} columns of the indices, natural exponent",
        "probabilities": "exp(score - running maximum), rounded to the value dtype before P V",
        "row_sum": "of unrounded probabilities, fp32",
        "sink": "exp(sink - maximum) joins the row sum of the output, not the lse",
        "rounding": "once, after the division by the row sum, to the dtype of q; a zero is +0",
        "lse": "maximum + log(row sum), fp32, natural, without the sink",
        "empty": "a row that names no entry: out 0, lse +inf, so that exp(score - lse) is 0",
    },
)

FP8_SPEC = OpSpec(
    op="sparse_attention_fp8",
    version=1,
    fields=dict(SPEC.fields)
    | {
        "order": "the slots of the first cache, padded to whole tiles, then those of the second",
        "read": "round(q * round_bf16(s)) to bf16, one rounding; the bf16 part as it is",
    },
)
"""Of reading FP8 pages directly. The way through a workspace (`kv_cache_fp8`) keeps s in fp32:
V3.2's scales are rounded here and not there; V4's are powers of two, and the two ways agree."""

FLASH_MLA_HEADS = (64, 128)
"""Query heads that FlashMLA's kernels take; fewer are padded with zero heads."""

FLASH_MLA_ENTRIES = 128
"""FlashMLA walks pairs of 64 columns; the indices are padded with -1 to a multiple of it."""

BLOCK_HEADS = 32
"""Triton: heads of one program. 64 would spill registers (d_v 512, sm_90); the instruction is one
for any number of heads and queries."""

NUM_WARPS = 8
NUM_STAGES = 1

BACKWARD_TILE = 32
"""Triton backward: entries of one step."""

_SCHEDULES = {
    "reference": (
        ("reference.py",),
        {"entry_tile": ENTRY_TILE, "gemm": "fp32 torch.bmm [H, D] x [D, 64], 2 or more"},
    ),
    "triton": (
        ("triton.py",),
        {
            "entry_tile": ENTRY_TILE,
            "block_heads": BLOCK_HEADS,
            "num_warps": NUM_WARPS,
            "num_stages": NUM_STAGES,
        },
    ),
    "flash_mla": (
        ("flash_mla.py",),
        {
            "kernel": "sparse_prefill_fwd",
            "entry_tile": ENTRY_TILE,
            "entries_multiple": FLASH_MLA_ENTRIES,
            "softmax": "pairs of tiles; base-2 exponent of the scaled score",
        },
    ),
}
_SHARED = {"reference": ("tree.py",), "triton": ("triton_tree.py",), "flash_mla": ("vendored.py",)}

IMPLEMENTATIONS = tuple(_SCHEDULES)

_FP8_FILES = {
    "reference": ("fp8.py", "reference.py"),
    "flash_mla": ("fp8_flash_mla.py",),
}

FP8_IMPLEMENTATIONS = tuple(_FP8_FILES)


def fp8_program(impl: str) -> Program:
    """Return the program of `sparse_attention_fp8`; of "flash_mla" with the binary's SHA-256."""
    source = source_sha256("sparse_attention", "spec.py", *_FP8_FILES[impl], shared=_SHARED[impl])
    schedule = dict(_SCHEDULES["reference"][1])
    if impl == "flash_mla":
        from consistent_kernels.vendored import find_binary

        schedule = {
            "kernel": "sparse_decode_fwd",
            "entry_tile": ENTRY_TILE,
            "parts": "one takes all",
            "binary_sha256": find_binary("_flashmla_C").sha256,
        }
    return Program(impl, source, schedule)


def program(impl: str) -> Program:
    """Return the program of `impl`; of "flash_mla" it holds the SHA-256 of vLLM's binary."""
    files, schedule = _SCHEDULES[impl]
    source = source_sha256("sparse_attention", "spec.py", *files, shared=_SHARED[impl])
    if impl == "flash_mla":
        from consistent_kernels.vendored import find_binary

        schedule = schedule | {"binary_sha256": find_binary("_flashmla_C").sha256}
    return Program(impl, source, schedule)
