"""Sparse top-k in CUDA C++ (`select.cu`): counts of score bins, then ranks inside one bin.

Built from Triton's missing pieces: shared-memory atomics count the bins, and a cluster of blocks
shares a long row. Integers alone: neither the blocks of a row nor its keys in a thread move a bit.
"""

from __future__ import annotations

import ctypes

import torch

from consistent_kernels.alignment import aligned_rows
from consistent_kernels.nvrtc import launch_cuda
from consistent_kernels.sparse_topk.spec import (
    BLOCK_THREADS,
    CLUSTERS,
    MANY_ROWS,
    VECTORS,
)


def cluster_and_vectors(rows: int, columns: int) -> tuple[int, int]:
    """Return (blocks of a row, times four keys of a thread; 0 where they are read anew).

    Speed alone depends on them: few rows are cut among many blocks.
    """
    # A row may start up to three columns after an aligned one.
    needed = -(-(columns + 3) // (4 * BLOCK_THREADS))
    largest = CLUSTERS[-1] if rows <= MANY_ROWS else CLUSTERS[1]
    cluster = next((c for c in CLUSTERS if c >= min(needed, largest)), largest)
    each = -(-needed // cluster)
    while each > VECTORS[-1] and cluster < CLUSTERS[-1]:
        cluster *= 2
        each = -(-needed // cluster)
    return cluster, next((v for v in VECTORS if v >= each), 0)


def sparse_topk_select(
    scores: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    k: int,
    shape: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Launch the kernel.

    Args:
        scores: [R, N] fp32; starts, ends: [R], both int32 or both int64.
        shape: (blocks of a row, times four keys of a thread); None takes `cluster_and_vectors`.

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
    cluster, vectors = shape or cluster_and_vectors(rows, columns)
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    # Rows lie along the grid's second dimension, which holds 65,535.
    for begin in range(0, rows, 65535):
        part = slice(begin, begin + 65535)
        launch_cuda(
            "consistent_kernels.sparse_topk",
            "select.cu",
            "sparse_topk_kernel",
            defines={"ROW_BLOCKS": cluster, "THREAD_VECTORS": vectors},
            grid=(cluster, min(rows - begin, 65535), 1),
            threads=BLOCK_THREADS,
            args=[
                (scores[part].data_ptr(), pointer),
                (starts[part].data_ptr(), pointer),
                (ends[part].data_ptr(), pointer),
                (out[part].data_ptr(), pointer),
                (scores.stride(0), ctypes.c_longlong),
                (columns, integer),
                (k, integer),
                (int(starts.dtype == torch.int64), integer),
            ],
            device=scores.device,
        )
    return out
