"""V4's gather in CUDA C++ (`gather.cu`): a warp reads entries one beside the other, in whole lines.

Triton lays a program's threads over pieces of many entries. The arithmetic is the same: one fp32
product and one rounding of each value, so no bit depends on which of the two runs, nor on `Shape`.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from consistent_kernels.errors import invalid
from consistent_kernels.kv_cache_fp8.layout import BLOCK_ALIGNMENT, V4
from consistent_kernels.kv_cache_fp8.triton import check_alignment
from consistent_kernels.nvrtc import launch_cuda


class Shape(NamedTuple):
    """How the entries are shared; speed alone depends on it."""

    warps: int = 4
    """Of a block."""
    batch: int = 4
    """Entries that a warp loads before it stores the first."""
    descending: bool = True
    """Whether the last entries come first, so that those read first are still in L2."""
    read: int = 0
    """Loads: 0 plain, 1 without L1, 2 first to leave L2 as well."""
    kept: int = 0
    """MiB of rows, written last, that leave L2 last; 0: all alike."""


SHAPE = Shape()
"""What `benchmarks.schedules` found fastest before the attention of 256 queries."""


def gather_v4_fwd(
    cache: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor | None,
    starts: torch.Tensor | None,
    out: torch.Tensor,
    indices: torch.Tensor | None,
    first_row: int,
    shape: Shape | None = None,
) -> None:
    """Launch the kernel; arguments as `kv_cache_fp8.triton.gather_kv_fp8_fwd`, layout V4."""
    check_alignment("gather_kv_fp8", cache)
    if out.data_ptr() % BLOCK_ALIGNMENT:
        given = f"address {out.data_ptr():#x}"
        raise invalid("gather_kv_fp8", "out", f"aligned to {BLOCK_ALIGNMENT} bytes", given)
    shape = shape or SHAPE
    entries = positions.numel()
    if not entries:
        return
    # Bound to names until the launch: their memory must not be given away before.
    # The kernel reads positions of four bytes, and what it is told of the others.
    positions, requests = positions.int().contiguous(), requests.contiguous()
    table = block_table if block_table is not None else starts.contiguous()
    each = shape.warps * shape.batch
    pointer, wide, integer = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
    launch_cuda(
        "consistent_kernels.kv_cache_fp8",
        "gather.cu",
        "gather_kv_fp8_v4_kernel",
        defines={
            "BLOCK_SIZE": cache.shape[1],
            "PAGED": int(block_table is not None),
            "REQUEST_BYTES": requests.element_size(),
            "TABLE_BYTES": table.element_size(),
            "WARPS": shape.warps,
            "BATCH": shape.batch,
            "DESCENDING": int(shape.descending),
            "READ": shape.read,
            "WRITE": int(shape.kept > 0),
        },
        grid=(-(-entries // each), 1, 1),
        threads=32 * shape.warps,
        args=[
            (cache.data_ptr(), pointer),
            (positions.data_ptr(), pointer),
            (requests.data_ptr(), pointer),
            (table.data_ptr(), pointer),
            (out.data_ptr(), pointer),
            (0 if indices is None else indices.data_ptr(), pointer),
            (table.stride(0), wide),
            (cache.stride(0), wide),
            (0 if indices is None else indices.stride(0), wide),
            (entries, integer),
            (positions.shape[1], integer),
            (first_row, integer),
            (shape.kept * (1 << 20) // (each * 2 * V4.width), integer),
        ],
        device=cache.device,
    )
