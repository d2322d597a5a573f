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

from consistent_kernels.alignment import aligned
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.grouped_linear.deep_gemm_grouped import (
    TMA_ELEMENTS,
    grouped_gemm,
    is_served,
)
from consistent_kernels.grouped_linear.deep_gemm_start import start


def addressable(x: torch.Tensor) -> torch.Tensor:
    """Return x [M, G, K], or a copy where TMA cannot address it."""
    rows, groups, inner = x.shape
    strides = (x.stride(0), x.stride(1))
    # A row of stride 0 or of rows that overlap would need no copy, but nobody has shown it.
    strided = all(stride % TMA_ELEMENTS == 0 and stride >= inner for stride in strides)
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
