"""Alignment as a condition that launchers meet, so that a kernel has one compiled form.

Triton compiles wide loads only for pointers and strides that it knows to be multiples of 16, and
another form for the rest. A form that followed a caller's memory would be a second program, and
two-byte loads for everybody cost a GEMM a factor of ten (H200, N = K = 4096, 1 to 256 rows).
"""

from __future__ import annotations

import torch

_BYTES = 16
_ELEMENTS = 16


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a copy where its first element is not on a 16-byte boundary."""
    return tensor if tensor.data_ptr() % _BYTES == 0 else tensor.clone()


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, columns], or a copy, with aligned rows of unit column stride.

    Every row starts on a 16-byte boundary and the row stride is a multiple of 16 elements.
    """
    if x.data_ptr() % _BYTES == 0 and x.stride(1) == 1 and x.stride(0) % _ELEMENTS == 0:
        return x
    rows, columns = x.shape
    padded = x.new_empty((rows, -(-columns // _ELEMENTS) * _ELEMENTS))[:, :columns]
    return padded.copy_(x)
