"""Straight-through gradients of FP8 experts: BF16 gradients at what the forward multiplied."""

from __future__ import annotations

import torch

from consistent_kernels.experts.backward import Grads, Multiplied, gradients_at
from consistent_kernels.quantization.reference import (
    dequantize_blocks_ref,
    dequantize_rows_ref,
    quantize_rows_ref,
)


def fp8_experts_bwd_ref(
    grad: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    limit: float | None,
    scale_format: str,
    needs: tuple[bool, bool, bool, bool],
) -> Grads:
    """See `consistent_kernels.fp8_experts.api.fp8_experts_bwd`; grad_x comes in fp32.

    D(q) = q * s is rounded to bf16 for the tensor cores on CUDA (power-of-two scales: no rounding),
    else it is fp32.
    """
    wide = torch.bfloat16 if x.is_cuda else torch.float32

    def seen(rows: torch.Tensor) -> torch.Tensor:
        # What a GEMM multiplies in the place of rows: D(Q(rows)).
        return dequantize_rows_ref(*quantize_rows_ref(rows, scale_format)).to(wide)

    def weights_of(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = ((w13[expert], w13_scale[expert]), (w2[expert], w2_scale[expert]))
        gate_up, down = (dequantize_blocks_ref(*pair).to(wide) for pair in pairs)
        return gate_up, down

    multiplied = Multiplied(seen(x), weights_of, seen, w13.shape[0], w2.shape[2])
    return gradients_at(multiplied, grad, ids, weights, limit, needs)
