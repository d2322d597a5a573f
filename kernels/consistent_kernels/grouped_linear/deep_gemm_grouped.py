"""DeepGEMM's grouped GEMM of a grouped linear, and which layers it serves."""

from __future__ import annotations

import torch

from consistent_kernels import vendored
from consistent_kernels.deep_gemm_start import parts

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
    library, calls = vendored.deep_gemm(), parts(x.shape[0])
    if len(calls) == 1:
        library.einsum(_EXPRESSION, x, weight, y)
        return
    for part in calls:
        library.einsum(_EXPRESSION, x[part], weight, y[part])
