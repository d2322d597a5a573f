"""What attention computes, and the pinned schedule of each implementation."""

from typing import Any

from consistent_kernels import llvm
from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

KEY_TILE = 64
"""Keys of one step of the online softmax, counted from position 0."""

PAGE_MULTIPLES = {"reference": 8, "llvm": 8, "triton": 16, "flash_attn": 16}
"""Keys of a page are a multiple of this, by implementation."""

DEFAULT_KEY_SPLIT = 4096
"""Keys of one split, counted from position 0; contexts up to it are never split."""

SPEC = OpSpec(
    op="attention",
    version=1,
    fields={
        "formula": "out = sum_j softmax_j(scale * q . k_j) v_j over the keys that the query sees",
        "visible": "key j <= query t, and j > t - sliding_window where there is a window",
        "scores": "fp32 dot product, times scale in fp32",
        "softmax": "online over ascending tiles of 64 keys, running maximum from -FLT_MAX",
        "probabilities": "exp(score - running maximum), rounded to the value dtype before P V",
        "row_sum": "of unrounded probabilities, fp32",
        "key_split": DEFAULT_KEY_SPLIT,
        "merge": "splits of key_split keys from position 0, merged in ascending order in fp32: "
        "m = max(a, b); x = x_a exp(m_a - m) + x_b exp(m_b - m)",
        "rounding": "once, after the division by the row sum, to the dtype of q; a zero is +0",
        "lse": "running maximum + log(row sum), fp32",
        "empty": "a row that sees no key: out 0, lse -inf",
    },
)

TILE_ROWS = 8
"""Reference: rows of one GEMM, slots of query positions times heads of a group (rounded up)."""

WIDE_ROWS = 64
"""Reference: narrow tiles are stacked up to so many rows, where a probe finds the same bits."""

BLOCK_ROWS = 64
"""Triton: rows of one program. 64 rows in 4 warps take the same MMA instruction in all phases."""

NUM_WARPS = 4
NUM_STAGES = 2


def query_slots(group: int, rows: int) -> int:
    """Return how many query positions share a tile of `rows` rows: a power of two, at most 64.

    Tiles begin at multiples of this number, so a position always has the same slot and sees the
    same tiles of keys, whether it comes alone (decode) or among others (prefill, chunk).
    """
    slots = 1
    while slots * 2 * group <= rows and slots * 2 <= KEY_TILE:
        slots *= 2
    return slots


FLASH_HEAD_DIMS = (64, 80, 96, 128, 256)

FLASH_CAUSAL_HEAD_DIMS = (128,)
"""FlashAttention 3: head dims whose tiles under the causal mask follow neither phase nor pages, as
measured on an H200. The others take a window that hides only the future: its tiles never do."""

FLASH_ONE_GROUP_HEAD_DIMS = (64,)
"""FlashAttention 3: head dims that tell it of two queries, however many come, and so take the tile
of one warp group (64 rows x 192 keys at head dim 64) in every phase: stock's decode tile, which it
takes under the causal mask and without one, for packed keys and for pages. On an H200 (9 query, 3
key heads, `benchmarks/flash_attn_masks`, "one group") 256 x 512 keys decode in 47 us instead of 75,
8 x 4,096 tokens prefill in 531 instead of 345."""

FLASH_PAGE_SIZES = (16, 32, 64)
"""FlashAttention 3: keys a page; TMA would load pages of 128, and what lies behind the last key."""

_SCHEDULES = {
    "reference": (
        ("parameters.py", "tile_shape.py", "plan.py", "reference.py", "loops.py"),
        {"key_tile": KEY_TILE, "tile_rows": TILE_ROWS, "gemm": "fp32 torch.bmm, 2 or more tiles"},
    ),
    "llvm": (
        ("parameters.py", "plan.py", "llvm.py", "llvm_kernel.py"),
        {
            "key_tile": KEY_TILE,
            "dot": "16 lanes ascending, then a halving tree",
            "row_sum": "halving tree over the tile",
            "values": "ascending",
        },
    ),
    "triton": (
        ("parameters.py", "triton.py"),
        {
            "key_tile": KEY_TILE,
            "block_rows": BLOCK_ROWS,
            "num_warps": NUM_WARPS,
            "num_stages": NUM_STAGES,
        },
    ),
    "flash_attn": (
        (
            "parameters.py",
            "flash_attn.py",
            "flash_attn_splits.py",
            "flash_attn_merge.py",
            "triton.py",
        ),
        {
            "num_splits": 1,
            "page_sizes": "16, 32, 64",
            "causal_mask": f"head_dim {FLASH_CAUSAL_HEAD_DIMS}; others a window",
            "one_warp_group": f"head_dim {FLASH_ONE_GROUP_HEAD_DIMS}, causal",
            "split_output": "rounded to the dtype of q before the merge",
            "merge": "m = max(a, b) of the lse; x = x_a exp(lse_a - m) + x_b exp(lse_b - m), fp32",
        },
    ),
}

IMPLEMENTATIONS = tuple(_SCHEDULES)


def program(impl: str) -> Program:
    """Return the program of `impl`, one of IMPLEMENTATIONS.

    Raises:
        MissingBinaryError: "flash_attn" where vLLM's CUDA wheel is not installed.
    """
    files, schedule = _SCHEDULES[impl]
    if impl == "flash_attn":
        from consistent_kernels import vendored

        schedule = schedule | {"library_sha256": vendored.find_binary("_vllm_fa3_C").sha256}
    if impl == "llvm":
        schedule = schedule | llvm.identity()
    shared = {"reference": ("cpu_gemm.py",), "llvm": llvm.SOURCES}.get(impl, ())
    return Program(impl, source_sha256("attention", "spec.py", *files, shared=shared), schedule)


def choose(device_type: str, arch: str | None = None, facts: Any = None) -> str:
    """Return the implementation for a device and a model.

    Args:
        device_type: "cpu" or "cuda".
        arch: for "cuda", e.g. "sm_90".
        facts: head_dim and sliding_window are read; None means any model.
    """
    if device_type != "cuda":
        return "llvm" if llvm.is_available() else "reference"
    served = (
        arch == "sm_90"
        and facts is not None
        and facts.head_dim in FLASH_HEAD_DIMS
        and facts.sliding_window is None
    )
    return "flash_attn" if served else "triton"
