"""Grouped linear through DeepGEMM's `einsum("bhr,hdr->bhd")`, out of the binary that vLLM ships.

On sm_90 and sm_100 it is the batched form of `bf16_gemm_nt`: TMA reads the rows of a group where
they stand in x [M, G, K], tiles and stages follow M, and K is added in ascending steps of the MMA
instruction whatever they are. `deep_gemm_start` shows for each (G, N, K), on the machine itself,
that a row's bits do not follow M.

A layer whose rows TMA cannot address (16-byte strides) runs the Triton kernel: a property of the
layer, never of the batch.

Source: DeepGEMM, csrc/apis/einsum.hpp (`bhr_hdr_bhd`) and impls/sm90_bf16_gemm.cuh.
"""

from __future__ import annotations

import torch

from consistent_kernels import vendored
from consistent_kernels.alignment import aligned
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.linear.deep_gemm import pieces

_EXPRESSION = "bhr,hdr->bhd"
_TMA_ELEMENTS = 8
"""bf16 elements of 16 bytes: what TMA's strides are multiples of."""


def is_served(columns: int, inner: int) -> bool:
    """Whether DeepGEMM computes a layer [G, N, K] bf16; else the Triton kernel does."""
    return columns % _TMA_ELEMENTS == 0 and inner % _TMA_ELEMENTS == 0


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


def addressable(x: torch.Tensor) -> torch.Tensor:
    """Return x [M, G, K], or a copy where TMA cannot address it."""
    rows, groups, inner = x.shape
    strides = (x.stride(0), x.stride(1))
    # A row of stride 0 or of rows that overlap would need no copy, but nobody has shown it.
    strided = all(stride % _TMA_ELEMENTS == 0 and stride >= inner for stride in strides)
    if x.data_ptr() % 16 == 0 and x.stride(2) == 1 and strided:
        return x
    return x.new_empty((rows, groups, inner)).copy_(x)


def grouped_linear_fwd(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Launch the kernel: x [M, G, K], weight [G, N, K] contiguous; returns [M, G, N].

    The first call of a layer's shape probes it (`deep_gemm_start.start`) and waits for the device.

    Raises:
        UnsupportedError: x is not bf16.
        NumericsError: the probe found that bits follow the batch.
    """
    from consistent_kernels.grouped_linear.deep_gemm_start import start

    if x.dtype != torch.bfloat16:
        raise UnsupportedError(
            "grouped_linear", f"{x.dtype} with impl 'deep_gemm'", ["torch.bfloat16"]
        )
    groups, columns, inner = weight.shape
    if not is_served(columns, inner):
        from consistent_kernels.grouped_linear import triton

        return triton.grouped_linear_fwd(x, weight)
    y = torch.empty((x.shape[0], groups, columns), dtype=x.dtype, device=x.device)
    if y.numel():
        start(groups, columns, inner, x.device)
        grouped_gemm(addressable(x), aligned(weight), y)
    return y
