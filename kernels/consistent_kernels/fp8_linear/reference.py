"""FP8 linear in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch

from consistent_kernels.fp8_linear.spec import BLOCK_K
from consistent_kernels.linear.probe import rows_per_call
from consistent_kernels.linear.reference import linear_bwd_ref
from consistent_kernels.linear.schedule import TILE_COLUMNS, TILE_ROWS
from consistent_kernels.linear.tiles import linear_by_calls, multiply_fp32
from consistent_kernels.quantization.reference import dequantize_blocks_ref, dequantize_rows_ref

_PROBED_COLUMNS = 4 * TILE_COLUMNS


def fp8_gemm_ref(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y = round(sum over blocks of 128 k, ascending, of (x_b W_b^T) * (s_x * s_w)).

    The product of one block is `linear`'s reference: fp32 GEMMs of 16 rows and 64 columns, whose
    bits depend neither on the number of rows nor on the width.

    Args:
        x: [M, K] float8_e4m3fn; x_scale: [M, ceil(K / 128)] fp32.
        weight: [N, K] float8_e4m3fn; weight_scale: [ceil(N / 128), ceil(K / 128)] fp32.
        out_dtype: dtype of the one rounding; fp32 rounds nothing.

    Returns:
        [M, N] in `out_dtype`.
    """
    columns, inner = weight.shape
    column_scale = weight_scale.repeat_interleave(BLOCK_K, 0)[:columns]
    total = torch.zeros((x.shape[0], columns), device=x.device, dtype=torch.float32)
    for block, start in enumerate(range(0, inner, BLOCK_K)):
        part = slice(start, start + BLOCK_K)
        product = _block_product(x[:, part].float(), weight[:, part].float().contiguous())
        scale = x_scale[:, block, None] * column_scale[None, :, block]
        total += product.mul_(scale)
    return total.to(out_dtype)


def _block_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    columns, inner = weight.shape
    sizes: tuple[int, ...] = (TILE_ROWS,)
    if x.device.type == "cpu":
        sizes = rows_per_call(multiply_fp32, min(columns, _PROBED_COLUMNS), inner, torch.float32)
    return linear_by_calls(x, weight, None, torch.float32, sizes=sizes, multiply=multiply_fp32)


def fp8_linear_bwd_ref(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    needs: tuple[bool, bool],
    weight_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """grad_x = g D(W), grad_weight = g^T D(x), where D(q) = q * s is what the forward multiplied.

    On CUDA D(q) is rounded to bf16 for the tensor cores (power-of-two scales: no rounding), else it
    is fp32.

    Args:
        grad_y: [M, N]; the rest as in `fp8_gemm_ref`.
        needs: which of (x, weight) want a gradient.
        weight_dtype: dtype of grad_weight.

    Returns:
        (grad_x [M, K] fp32 on CPU and bf16 on CUDA, grad_weight [N, K]).
    """
    dtype = torch.bfloat16 if grad_y.is_cuda else torch.float32
    # linear_bwd_ref reads the weight for grad_x and x for grad_weight, and the dtype of x.
    x_seen = dequantize_rows_ref(x, x_scale).to(dtype) if needs[1] else x.new_empty(0, dtype=dtype)
    weight_seen = dequantize_blocks_ref(weight, weight_scale).to(dtype) if needs[0] else weight
    grads = linear_bwd_ref(grad_y, x_seen, weight_seen, (*needs, False), weight_dtype)
    return grads[0], grads[1]
