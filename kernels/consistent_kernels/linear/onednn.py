"""Linear by oneDNN's bf16 GEMM, for CPUs that multiply bf16 in hardware."""

from __future__ import annotations

import functools

import torch

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.linear.probe import rows_per_call
from consistent_kernels.linear.reference import linear_ref
from consistent_kernels.linear.tiles import linear_by_calls


@functools.cache
def native_bf16() -> str | None:
    """Return this CPU's bf16 dot product, "amx" or "avx512_bf16", or None where it is emulated."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    return "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else None


def multiply_bf16(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write round(x W^T + b): one bf16 GEMM with fp32 accumulators, bias added to those.

    Args:
        x: [R, K]; weight: [N, K]; bias: [N] or None; out: [R, N]; all bf16.
    """
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def linear_onednn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y = round(x W^T + b) in calls of 16 rows, or of other sizes that gave the same bits.

    PyTorch's bf16 GEMM always rounds its result to bf16, so fp32 results (lm_head) are computed by
    the reference's tiles from an fp32 weight.

    Args:
        x: [T, K] bf16.
        weight: [N, K], fp32 where `out_dtype` is fp32, else bf16.
        bias: [N] bf16 or None.
        out_dtype: bf16 or fp32.

    Returns:
        [T, N] in `out_dtype`.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or native_bf16() is None:
        raise UnsupportedError(
            "linear (onednn)",
            f"{x.dtype} on {x.device.type} with native bf16 {native_bf16()}",
            ("torch.bfloat16 on a CPU with amx or avx512_bf16", "impl 'reference'"),
        )
    if out_dtype == torch.float32:
        return linear_ref(x, weight, bias, out_dtype)
    columns, inner = weight.shape
    sizes = rows_per_call(multiply_bf16, columns, inner, torch.bfloat16)
    return linear_by_calls(x, weight, bias, out_dtype, sizes=sizes, multiply=multiply_bf16)
