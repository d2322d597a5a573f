"""Straight-through gradients of FP8 experts: BF16 gradients at what the forward multiplied."""

from __future__ import annotations

import torch

from consistent_kernels.experts.backward import (
    Grads,
    gated_activation_bwd,
    product,
    sum_over_slots,
)
from consistent_kernels.experts.reference import expert_slices, gated_activation, sorted_rows
from consistent_kernels.quantization.reference import (
    dequantize_blocks_ref,
    dequantize_rows_ref,
    quantize_rows_ref,
)


def _seen(x: torch.Tensor, scale_format: str, dtype: torch.dtype) -> torch.Tensor:
    """What a GEMM multiplies in the place of x: D(Q(x))."""
    return dequantize_rows_ref(*quantize_rows_ref(x, scale_format)).to(dtype)


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
    else it is fp32. Intermediate results are recomputed.
    """
    tokens, slots = ids.shape
    order, counts = sorted_rows(ids, w13.shape[0])
    token = order // slots
    dtype, wide = x.dtype, torch.bfloat16 if x.is_cuda else torch.float32
    rows, grad_rows = _seen(x, scale_format, wide)[token], grad[token].float()
    row_weights = weights.reshape(-1)[order].float()[:, None]
    grad_x = (
        torch.zeros((tokens * slots, x.shape[1]), device=x.device, dtype=torch.float32)
        if needs[0]
        else None
    )
    grad_w13 = torch.zeros(w13.shape, device=x.device, dtype=torch.float32) if needs[1] else None
    grad_w2 = torch.zeros(w2.shape, device=x.device, dtype=torch.float32) if needs[2] else None
    grad_weights = torch.zeros_like(weights).reshape(-1) if needs[3] else None
    for expert, part in expert_slices(counts):
        gate_up_weight = dequantize_blocks_ref(w13[expert], w13_scale[expert]).to(wide)
        down = dequantize_blocks_ref(w2[expert], w2_scale[expert]).to(wide)
        mine = rows[part]
        gate, up = product(mine, gate_up_weight.t()).to(dtype).chunk(2, dim=1)
        hidden = _seen(gated_activation(gate, up, limit), scale_format, wide)
        if grad_weights is not None:
            y = product(hidden, down.t()).to(dtype).float()
            grad_weights[order[part]] = (grad_rows[part] * y).sum(-1)
        grad_y = (grad_rows[part] * row_weights[part]).to(dtype)
        if grad_w2 is not None:
            grad_w2[expert] = product(grad_y.t(), hidden)
        if grad_x is None and grad_w13 is None:
            continue
        grad_gate_up = gated_activation_bwd(product(grad_y, down), gate, up, limit).to(dtype)
        if grad_w13 is not None:
            grad_w13[expert] = product(grad_gate_up.t(), mine)
        if grad_x is not None:
            grad_x[order[part]] = product(grad_gate_up, gate_up_weight)
    if grad_x is not None:
        grad_x = sum_over_slots(grad_x, slots)
    return (
        grad_x,
        grad_w13,
        grad_w2,
        None if grad_weights is None else grad_weights.view(tokens, slots),
    )
