"""Start-up probe: which row counts of a GEMM call give the bits of the fixed 16-row tile.

The 16-row tile is the program. A larger call is faster and a smaller one cheaper for a few rows;
where this CPU and library give the same bits, which of them runs is scheduling, not arithmetic.
"""

from __future__ import annotations

import functools
import hashlib

import torch

from consistent_kernels.linear.schedule import TILE_ROWS
from consistent_kernels.linear.tiles import Multiply

CANDIDATE_ROWS = (4, 64, 256)


def probe_inputs(
    rows: int, columns: int, inner: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, inner], weight [columns, inner], the same on every machine, exact in bf16.

    The second half of K cancels the first in exact arithmetic, so what is left of a product is the
    error of its additions alone: their order shows even after a rounding to bf16. An odd K leaves a
    column of zeros of both signs: whether a sum starts at +0 or at its first product shows where
    that column is all there is.
    """
    half = inner // 2
    x = torch.zeros((rows, inner), dtype=torch.float32)
    weight = torch.zeros((columns, inner), dtype=torch.float32)
    x[:, :half] = _numbers(rows, half, 1)
    weight[:, :half] = _numbers(columns, half, 2)
    x[:, half : 2 * half] = x[:, :half].flip(1)
    weight[:, half : 2 * half] = -weight[:, :half].flip(1)
    if inner % 2:
        x[::2, -1] = -0.0
        weight[:, -1] = _numbers(columns, 1, 3).view(-1)
    return x.to(dtype), weight.to(dtype)


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two contiguous tensors hold the same bytes; signs of zeros count."""
    return torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def _numbers(rows: int, columns: int, salt: int) -> torch.Tensor:
    # Integer hashing: PyTorch's normal generator depends on the vector instructions in use.
    index = torch.arange(rows * columns, dtype=torch.int64).view(rows, columns)
    bits = ((index + salt * 7919) * 2654435761) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 2246822519) & 0xFFFFFFFF
    mantissa = ((bits >> 8) & 0xFF).float() - 127.5
    # Magnitudes over twelve powers of two: equal ones would often add without error.
    return (mantissa / (1 << ((bits >> 20) % 12))).bfloat16().float()


@functools.cache
def rows_per_call(
    multiply: Multiply, columns: int, inner: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the row counts, ascending, whose calls give the bytes of the 16-row tile; cached.

    Args:
        multiply: the program's tile.
        columns: N of the probe; a few blocks where a column block is a GEMM of its own.
        inner: K.
        dtype: dtype in which x and weight are multiplied, also the result's.

    Returns:
        A subset of (4, 16, 64, 256) that always holds 16.
    """
    largest = max(CANDIDATE_ROWS)
    x, weight = probe_inputs(largest, columns, inner, dtype)
    expected = torch.empty((largest, columns), dtype=dtype)
    for start in range(0, largest, TILE_ROWS):
        part = slice(start, start + TILE_ROWS)
        multiply(x[part], weight, None, expected[part])
    sizes = [TILE_ROWS]
    for rows in CANDIDATE_ROWS:
        checked = max(rows, TILE_ROWS)
        actual = torch.empty((checked, columns), dtype=dtype)
        for start in range(0, checked, rows):
            part = slice(start, start + rows)
            multiply(x[part], weight, None, actual[part])
        if same_bytes(actual, expected[:checked]):
            sizes.append(rows)
    return tuple(sorted(sizes))


def witness(multiply: Multiply, dtype: torch.dtype) -> str:
    """Return a hash over one tile's bits: it differs where the library takes another code path.

    The sources and versions in a contract do not show which instructions MKL or oneDNN selected,
    nor the environment variables that change their choice. Their results do.
    """
    columns, inner = 192, 576
    x, weight = probe_inputs(TILE_ROWS, columns, inner, dtype)
    out = torch.empty((TILE_ROWS, columns), dtype=dtype)
    multiply(x, weight, None, out)
    return hashlib.sha256(out.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
