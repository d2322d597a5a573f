"""RMSNorm of bf16 rows as one compiled loop: the reference's operations in the reference's order.

A dozen aten calls a norm cost more than the arithmetic where few rows are decoded. Numba compiles
without contraction or reassociation, so every product, sum, division and root is rounded as in
`reference.py`; a probe at first use compares the bytes, and `rows_loop` is None where they differ.
"""

from __future__ import annotations

import ctypes
import functools
import math

import numba
import numpy as np
import torch

from consistent_kernels.rms_norm.reference import add_rms_norm_ref, rms_norm_ref

_PROBED_ROWS = 64


# In every file of loops: Numba's cache on disk does not notice a change in another file.
@numba.njit(inline="always")
def _wide(bits: np.uint16) -> np.float32:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(inline="always")
def _rounded(x: np.float32) -> np.uint16:
    # To nearest, ties to even; a NaN as PyTorch writes it.
    bits = np.float32(x).view(np.uint32)
    bits = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16(bits >> np.uint32(16)) if x == x else np.uint16(0x7FC0)


@numba.njit(inline="always")
def _tree(squares: np.ndarray, size: int, half: int) -> np.float32:
    """Halving tree over `squares`, which it overwrites; see `reference._rstd`."""
    if 0 < half < size < 2 * half:
        for j in range(size - half):
            squares[j] += squares[half + j]
        half //= 2
    while half:
        for j in range(half):
            squares[j] += squares[half + j]
        half //= 2
    return squares[0]


_POINTER = numba.types.CPointer(numba.types.uint16)
_SIGNATURE = numba.void(*(_POINTER,) * 3, numba.float32, *(numba.int64,) * 4, *(_POINTER,) * 2)


@numba.cfunc(_SIGNATURE, cache=True)
def _norm(x_at, residual_at, weight_at, eps, rows, size, half, adds, out_at, total_at):
    x = numba.carray(x_at, (rows, size))
    weight = numba.carray(weight_at, (size,))
    out = numba.carray(out_at, (rows, size))
    values, squares = np.empty(size, np.float32), np.empty(size, np.float32)
    for t in range(rows):
        if adds:
            residual = numba.carray(residual_at, (rows, size))
            total = numba.carray(total_at, (rows, size))
            for j in range(size):
                bits = _rounded(_wide(x[t, j]) + _wide(residual[t, j]))
                total[t, j] = bits
                values[j] = _wide(bits)
        else:
            for j in range(size):
                values[j] = _wide(x[t, j])
        for j in range(size):
            squares[j] = values[j] * values[j]
        mean = _tree(squares, size, half) / np.float32(size)
        scale = np.float32(1) / np.sqrt(mean + eps)
        for j in range(size):
            out[t, j] = _rounded((values[j] * scale) * _wide(weight[j]))


# Addresses instead of arrays: turning tensors into arrays would cost more than the loop.
_call = ctypes.CFUNCTYPE(
    None,
    *(ctypes.c_void_p,) * 3,
    ctypes.c_float,
    *(ctypes.c_int64,) * 4,
    *(ctypes.c_void_p,) * 2,
)(_norm.address)


def _run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1]
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    total, residual_at, total_at = out, None, None
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty(x.shape, dtype=torch.bfloat16)
        residual_at, total_at = residual.data_ptr(), total.data_ptr()
    half = 1 << (size - 1).bit_length() >> 1
    rows = x.numel() // size if size else 0
    adds = residual is not None
    _call(
        x.data_ptr(),
        residual_at,
        weight.data_ptr(),
        eps,
        rows,
        size,
        half,
        adds,
        out.data_ptr(),
        total_at,
    )
    return out, total


def rms_norm_loop(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `rms_norm_ref`, of bf16 [..., H] on CPU."""
    return _run(x, None, weight, eps)[0]


def add_rms_norm_loop(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `add_rms_norm_ref`, of bf16 [..., H] on CPU."""
    return _run(x, residual, weight, eps)


@functools.cache
def has_reference_bits(size: int) -> bool:
    """Return whether the loop gives the reference's bytes for rows of `size`; cached."""
    angles = torch.arange(2 * _PROBED_ROWS * size, dtype=torch.float64).view(2, _PROBED_ROWS, size)
    # Magnitudes over eight powers of two, so that the order of the sum shows.
    values = (torch.sin(angles * math.pi * 0.7071) * 2.0 ** (angles % 8 - 4)).bfloat16()
    weight = (1 + 0.2 * torch.cos(angles[0, 0])).bfloat16()
    x, residual = values[0], values[1]
    pairs = [
        (rms_norm_loop(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6)),
        *zip(
            add_rms_norm_loop(x, residual, weight, 1e-5),
            add_rms_norm_ref(x, residual, weight, 1e-5),
            strict=True,
        ),
    ]
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
