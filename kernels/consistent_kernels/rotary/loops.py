"""Rotary of bf16 heads as one compiled loop: the reference's operations in the reference's order.

See `consistent_kernels.rms_norm.loops`: no contraction, so that both products of a sum are rounded
as in `reference.py`, and a probe that compares the bytes.
"""

from __future__ import annotations

import ctypes
import functools

import numba
import numpy as np
import torch

from consistent_kernels.rotary.reference import rotary_ref


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


_BITS = numba.types.CPointer(numba.types.uint16)
_TABLE = numba.types.CPointer(numba.types.float32)
_POSITIONS = numba.types.CPointer(numba.types.int64)


@numba.cfunc(numba.int64(_POSITIONS, _TABLE, _TABLE, _BITS, _BITS, *(numba.int64,) * 6), cache=True)
def _rotate(positions_at, cos_at, sin_at, x_at, y_at, tokens, stride, heads, width, half, limit):
    positions = numba.carray(positions_at, (tokens,))
    cos = numba.carray(cos_at, (limit, half))
    sin = numba.carray(sin_at, (limit, half))
    x = numba.carray(x_at, (tokens * stride,))
    y = numba.carray(y_at, (tokens * heads * width,))
    # A slice and a plain index: only such loops are vectorized.
    values, turned = np.empty(width, np.float32), np.empty(width, np.float32)
    for t in range(tokens):
        position = positions[t]
        if position < 0 or position >= limit:
            return 1
        c, s = cos[position], sin[position]
        for h in range(heads):
            a, b = t * stride + h * width, (t * heads + h) * width
            source, target = x[a : a + width], y[b : b + width]
            for j in range(width):
                values[j] = _wide(source[j])
            first, second = values[:half], values[half : 2 * half]
            first_out, second_out = turned[:half], turned[half : 2 * half]
            for j in range(half):
                first_out[j] = first[j] * c[j] - second[j] * s[j]
            for j in range(half):
                second_out[j] = second[j] * c[j] + first[j] * s[j]
            for j in range(2 * half):
                target[j] = _rounded(turned[j])
            for j in range(2 * half, width):
                target[j] = source[j]
    return 0


_call = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_void_p,) * 5, *(ctypes.c_int64,) * 6)(
    _rotate.address
)


def _one(
    positions: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor | None:
    tokens, heads, width = x.shape
    if x.stride(2) != 1 or x.stride(1) != width:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    limit, half = cos.shape
    bad = _call(
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
        tokens,
        x.stride(0),
        heads,
        width,
        half,
        limit,
    )
    return None if bad else out


def rotary_loop(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rotary_ref`, of bf16 on CPU with contiguous tables; a bad position raises as there."""
    at = positions.to(torch.int64).contiguous()
    rotated = _one(at, q, cos_table, sin_table), _one(at, k, cos_table, sin_table)
    if rotated[0] is None or rotated[1] is None:
        return rotary_ref(positions, q, k, cos_table, sin_table)
    return rotated


@functools.cache
def has_reference_bits(head_dim: int, half: int) -> bool:
    """Return whether the loop gives the reference's bytes for these widths; cached."""
    heads, tokens = 3, 4
    numbers = torch.arange(tokens * heads * head_dim, dtype=torch.float64)
    values = (torch.sin(numbers * 2.2214) * 2.0 ** (numbers % 6 - 3)).bfloat16()
    q = values.view(tokens, heads, head_dim)
    k = q.flip(0)[:, :1]
    angles = torch.arange(tokens * half, dtype=torch.float64).view(tokens, half)
    cos, sin = torch.cos(angles).float(), torch.sin(angles).float()
    positions = torch.arange(tokens)
    pairs = zip(
        rotary_loop(positions, q, k, cos, sin), rotary_ref(positions, q, k, cos, sin), strict=True
    )
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
