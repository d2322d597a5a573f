"""Linear through DeepGEMM's `bf16_gemm_nt`, out of the binary that vLLM ships.

DeepGEMM picks tiles, stages and clusters by M, and adds K in ascending steps of the MMA instruction
whatever it picks, so a row's bits do not follow M. `deep_gemm_start.prepare` shows that for every
(N, K) of a model, on the machine itself, before the first token.

A layer with a bias, or whose rows TMA cannot address (16-byte strides), runs the Triton kernel: a
property of the layer, never of the batch. On an H200 both give the same bits.
"""

from __future__ import annotations

import torch

from consistent_kernels import vendored
from consistent_kernels.alignment import aligned
from consistent_kernels.deep_gemm_start import parts
from consistent_kernels.errors import UnsupportedError

_TMA_BYTES = 16


def is_served(columns: int, inner: int, has_bias: bool, out_dtype: torch.dtype) -> bool:
    """Whether DeepGEMM computes a layer [N, K] bf16; else the Triton kernel does."""
    row_bytes = (inner * torch.bfloat16.itemsize, columns * out_dtype.itemsize)
    return not has_bias and all(size % _TMA_BYTES == 0 for size in row_bytes)


def gemm(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """Write x W^T to y, fp32 accumulation; x [M, K], weight [N, K], y [M, N], all contiguous."""
    library, calls = vendored.deep_gemm(), parts(x.shape[0])
    if len(calls) == 1:  # a view of each side costs as much as the call
        library.bf16_gemm_nt(x, weight, y)
        return
    for part in calls:
        library.bf16_gemm_nt(x[part], weight, y[part])


def linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the kernel.

    Args:
        x: [M, K]; weight: [N, K] contiguous, dtype of x; bias: [N] or None.
        out_dtype: dtype of the result.

    Returns:
        [M, N].

    Raises:
        UnsupportedError: x is not bf16.
    """
    columns, inner = weight.shape
    if x.dtype != torch.bfloat16:
        raise UnsupportedError("linear", f"{x.dtype} with impl 'deep_gemm'", ["torch.bfloat16"])
    if not is_served(columns, inner, bias is not None, out_dtype):
        from consistent_kernels.linear import triton

        return triton.linear_fwd(x, weight, bias, out_dtype)
    y = torch.empty((x.shape[0], columns), dtype=out_dtype, device=x.device)
    gemm(aligned(x.contiguous()), aligned(weight), y)
    return y
