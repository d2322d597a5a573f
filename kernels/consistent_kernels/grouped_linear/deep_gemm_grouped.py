"""DeepGEMM's grouped GEMM of a grouped linear, and which layers it serves."""

from __future__ import annotations

import torch

from consistent_kernels import vendored
from consistent_kernels.linear.deep_gemm import pieces

_EXPRESSION = "bhr,hdr->bhd"
TMA_ELEMENTS = 8
"""bf16 elements of 16 bytes: what TMA's strides are multiples of."""


def is_served(columns: int, inner: int) -> bool:
    """Whether DeepGEMM computes a layer [G, N, K] bf16; else the Triton kernel does."""
    return columns % TMA_ELEMENTS == 0 and inner % TMA_ELEMENTS == 0


def grouped_gemm(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """Write x W^T to y, fp32 accumulation, one rounding.

    Args:
        x: [M, G, K] bf16, unit stride in K, its first element and other strides of 16 bytes.
        weight: [G, N, K], y: [M, G, N], both contiguous.
    """
    library, start = vendored.deep_gemm(), 0
    sizes = pieces(x.shape[0])
    if len(sizes) == 1:
        library.einsum(_EXPRESSION, x, weight, y)
        return
    for rows in sizes:
        part = slice(start, start + rows)
        library.einsum(_EXPRESSION, x[part], weight, y[part])
        start += rows
