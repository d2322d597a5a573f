"""Scales laid out as DeepGEMM reads them: copies of bits, no arithmetic.

Source: DeepGEMM's `get_mn_major_tma_aligned_tensor` and
`get_mn_major_tma_aligned_packed_ue8m0_tensor` (csrc/utils/layout.hpp).
"""

from __future__ import annotations

import torch

from consistent_kernels.errors import invalid

_TMA_BYTES = 16
_PER_INT32 = 4


def _aligned(rows: int) -> int:
    unit = _TMA_BYTES // 4
    return -(-rows // unit) * unit


def empty_tma_aligned(
    rows: int, columns: int, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an empty [rows, columns] of a 4-byte dtype whose columns are 16-byte aligned."""
    return torch.empty_strided((rows, columns), (1, _aligned(rows)), dtype=dtype, device=device)


def tma_aligned_scales(scale: torch.Tensor) -> torch.Tensor:
    """Return fp32 scales column-major, each column on a 16-byte boundary (sm_90).

    Args:
        scale: [M, G] fp32, any strides; returned as it is where it already has this layout.

    Returns:
        [M, G] fp32 with strides (1, M rounded up to 4).

    Raises:
        InvalidInputError: dtype or rank.
    """
    _check("tma_aligned_scales", scale, torch.float32)
    if is_tma_aligned(scale):
        return scale
    rows, columns = scale.shape
    out = empty_tma_aligned(rows, columns, dtype=torch.float32, device=scale.device)
    return out.copy_(scale)


def is_tma_aligned(scale: torch.Tensor) -> bool:
    """Whether [M, G] has strides (1, M rounded up to 4) and an aligned first element."""
    strides = (1, _aligned(scale.shape[0]))
    return scale.stride() == strides and scale.data_ptr() % _TMA_BYTES == 0


def pack_ue8m0_scales(scale: torch.Tensor) -> torch.Tensor:
    """Return the exponent bytes of power-of-two scales, four neighbours in an int32 (sm_100).

    Byte i of a word holds column 4 w + i; absent columns are zero. The mantissa is dropped without
    a look at it, so that no device is waited for: pass scales of format "ue8m0" only.

    Args:
        scale: [M, G] fp32.

    Returns:
        [M, ceil(G / 4)] int32 with strides (1, M rounded up to 4).
    """
    _check("pack_ue8m0_scales", scale, torch.float32)
    rows, columns = scale.shape
    words = -(-columns // _PER_INT32)
    exponents = torch.zeros((rows, words * _PER_INT32), dtype=torch.uint8, device=scale.device)
    exponents[:, :columns] = (scale.contiguous().view(torch.int32) >> 23) & 0xFF
    packed = empty_tma_aligned(rows, words, dtype=torch.int32, device=scale.device)
    return packed.copy_(exponents.view(torch.int32))


def unpack_ue8m0_scales(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the fp32 scales [M, columns] behind `pack_ue8m0_scales`.

    An exponent byte of 255 is NaN.

    Raises:
        InvalidInputError: dtype or rank, or more columns than the words hold.
    """
    op, most = "unpack_ue8m0_scales", packed.shape[-1] * _PER_INT32
    _check(op, packed, torch.int32)
    if not 0 <= columns <= most:
        raise invalid(op, "columns", f"at most {most} of {packed.shape[1]} words", columns)
    words = torch.empty(packed.shape, dtype=torch.int32, device=packed.device).copy_(packed)
    exponents = words.view(torch.uint8)[:, :columns].to(torch.int32)
    bits = exponents << 23
    return torch.where(exponents == 0xFF, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def _check(op: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dim() != 2 or tensor.dtype != dtype:
        raise invalid(op, "scale", f"2-D {dtype}", f"{tensor.dim()}-D {tensor.dtype}")
