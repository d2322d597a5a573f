"""What the sparse top-k selects, and the pinned schedule of each implementation."""

from consistent_kernels.contract import OpSpec, Program
from consistent_kernels.program_source import source_sha256

SPEC = OpSpec(
    op="sparse_topk",
    version=1,
    fields={
        "key": "ordered score bits << 32 | position inside the request; the k largest keys",
        "ordered_bits": "bits ^ 0x80000000 if the sign is clear, else ~bits",
        "signed_zero": "-0.0 counts as +0.0",
        "nan": "every NaN is one value, below -inf",
        "ties": "larger position wins",
        "order": "descending position, -1 padding last",
        "short_rows": "a row of at most k positions selects them all",
    },
)
"""Why the two zeros are one value: index scores are sums of relu(q . k) * w, whose zeros take their
sign from the weights and from the compiler's max; as numbers they tie, and ties go by position.
Why NaN is lowest: a broken score must not push real ones out, and torch.topk puts it on top."""

MAX_K = 2048
"""The largest index_topk of a published model (DeepSeek-V3.2); V4 uses 512 and 1024."""

WIDTH = 8192
"""Triton: keys that one program holds in registers; half as many where rows are short."""

CHUNK = 8192
"""Triton: scores whose group maxima one program forms at a time."""

MANY_ROWS = 132
"""The multiprocessors of an H200. Triton: with more rows every row is one program's. CUDA: as many
blocks are in work at once."""

PROGRAMS = 528
"""Triton: programs among which fewer rows are shared."""

KEYS_PER_WARP = 512
"""Triton: 16 keys a thread."""

REGISTERS_FEW_ROWS, REGISTERS_MANY_ROWS = 128, 64
"""Triton, rows of more than WIDTH scores: registers a thread. 64 let two programs share a
multiprocessor, so that one counts while the other waits for memory; alone, 128 are faster (H200,
32,768 positions: 34 against 48 us for 64 rows, 76 against 60 us for 256)."""

BLOCK_THREADS = (512, 1024)
"""CUDA: threads of a block."""

BLOCKS = (1, 2, 4, 8)
"""CUDA: blocks that share a row."""

VECTORS = (1, 2, 4, 8)
"""CUDA: times four keys that a thread holds; longer rows are read anew in each pass."""

SHORT_ROWS = (
    (4096, (2, 512, 1), (2, 512, 2)),
    (8192, (4, 512, 1), (4, 512, 2)),
)
"""CUDA, `short.cu`: columns; vectors, threads and resident blocks of at most MANY_ROWS rows; those
of more rows, of which two blocks of a multiprocessor have twice as many in work. Longer rows are
`select.cu`'s.
"""

SHORT_VECTORS = (1, 2, 4)
"""CUDA, `short.cu`: times four scores that a thread holds."""

SHORT_THREADS = (256, 512, 1024)
"""CUDA, `short.cu`: threads of a block."""

SHORT_PLACES = 4096
"""CUDA, `short.cu`: selected places that its shared memory holds."""

_FILES = {
    "reference": ("reference.py",),
    "triton": ("triton.py",),
    "cuda": ("cuda.py", "select.cu", "short.cu", "triton.py"),
}

IMPLEMENTATIONS = tuple(_FILES)


def program(impl: str) -> Program:
    """Return the program of `impl` ("reference", "triton" or "cuda"); all give the same bits."""
    schedule = (
        {"width": WIDTH, "chunk": CHUNK, "keys_per_warp": KEYS_PER_WARP} if impl == "triton" else {}
    )
    shared = {"triton": ("alignment.py",), "cuda": ("alignment.py", "nvrtc.py")}.get(impl, ())
    return Program(
        impl, source_sha256("sparse_topk", "spec.py", *_FILES[impl], shared=shared), schedule
    )
