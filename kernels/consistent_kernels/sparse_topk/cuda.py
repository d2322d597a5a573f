"""Sparse top-k in CUDA C++ (`select.cu`): counts of score bins, then ranks inside one bin.

Built from Triton's missing pieces: shared-memory atomics count the bins, and a cluster of blocks
shares a long row. Integers alone: neither the blocks of a row nor its keys in a thread move a bit.
`short.cu` gives the same bits for rows that one block's registers hold, by fewer instructions.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from consistent_kernels.alignment import aligned_rows
from consistent_kernels.errors import invalid
from consistent_kernels.nvrtc import launch_cuda
from consistent_kernels.sparse_topk.spec import (
    BLOCK_THREADS,
    BLOCKS,
    MANY_ROWS,
    SHORT_PLACES,
    SHORT_ROWS,
    VECTORS,
)
from consistent_kernels.sparse_topk.triton import sparse_topk_fwd


class Shape(NamedTuple):
    """How a row is shared; speed alone depends on it."""

    blocks: int
    """Blocks of a row, a cluster."""
    vectors: int
    """Times four keys that a thread holds; 0: they are read anew in each pass."""
    threads: int = 1024
    """Of a block."""
    resident: int = 1
    """Blocks that a multiprocessor must hold at once: fewer registers for each."""
    short: bool = False
    """By `short.cu`."""


def row_shape(rows: int, columns: int, k: int) -> Shape | None:
    """Return the shape for rows of at most `columns` scores; None where Triton's is faster.

    The fewer rows, the more blocks share one: as long as all rows are in work at once.
    """
    for held, few, many in SHORT_ROWS:
        if columns <= held and k <= SHORT_PLACES:
            return Shape(1, *(few if rows <= MANY_ROWS else many), short=True)
    threads = BLOCK_THREADS[-1]
    # A row's first vector begins at or before its start, so no row has more vectors than columns.
    needed = -(-columns // (4 * threads))
    blocks = BLOCKS[0]
    while blocks < BLOCKS[-1] and blocks < needed and 2 * blocks * rows <= MANY_ROWS:
        blocks *= 2
    each = -(-needed // blocks)
    vectors = next((count for count in VECTORS if count >= each), None)
    if vectors is None:
        # Too long for registers: two blocks that read it anew in each pass beat Triton's programs
        # (H200, 64 rows of 131,072: 45 against 60 us), one does not (256 rows: 129 against 115).
        return Shape(blocks, 0, threads) if blocks == 2 else None
    return Shape(blocks, vectors, threads)


def sparse_topk_select(
    scores: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    tickets: torch.Tensor | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """Launch the kernel, or Triton's where rows are many and too long for it: equal bits.

    Args:
        scores: [R, N] fp32; starts, ends: [R] int32 or int64.
        tickets: of `sparse_topk_fwd`.
        shape: None takes `row_shape`.

    Returns:
        [R, k] int32.
    """
    rows, columns = scores.shape
    out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    scores = aligned_rows(scores)
    if starts.dtype != ends.dtype:
        starts, ends = starts.long(), ends.long()
    starts, ends = starts.contiguous(), ends.contiguous()
    shape = shape or row_shape(rows, columns, k)
    if shape is None:
        return sparse_topk_fwd(scores, starts, ends, k, tickets)
    held = 4 * shape.blocks * shape.vectors * shape.threads
    if shape.vectors and held < columns:
        raise invalid("sparse_topk", "shape", f"of at least {columns} scores", held)
    if shape.short and k > SHORT_PLACES:
        raise invalid("sparse_topk", "k", f"at most {SHORT_PLACES} for a short row's shape", k)
    wide = int(starts.dtype == torch.int64)
    defines = {
        "THREAD_VECTORS": shape.vectors,
        "BLOCK_THREADS": shape.threads,
        "RESIDENT_BLOCKS": shape.resident,
    }
    if shape.short:
        file, kernel = "short.cu", "sparse_topk_short_kernel"
        defines["BORDER_BYTES"] = 8 if wide else 4
    else:
        file, kernel = "select.cu", "sparse_topk_kernel"
        defines["ROW_BLOCKS"] = shape.blocks
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    # Rows lie along the grid's second dimension, which holds 65,535.
    for begin in range(0, rows, 65535):
        part = slice(begin, begin + 65535)
        args = [
            (scores[part].data_ptr(), pointer),
            (starts[part].data_ptr(), pointer),
            (ends[part].data_ptr(), pointer),
            (out[part].data_ptr(), pointer),
            (scores.stride(0), ctypes.c_longlong),
            (columns, integer),
            (k, integer),
        ]
        launch_cuda(
            "consistent_kernels.sparse_topk",
            file,
            kernel,
            defines=defines,
            grid=(shape.blocks, min(rows - begin, 65535), 1),
            threads=shape.threads,
            args=args if shape.short else [*args, (wide, integer)],
            device=scores.device,
        )
    return out
