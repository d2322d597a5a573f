"""FP8 experts in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch

from consistent_kernels.experts.reference import gated_activation, laid_out, sorted_rows
from consistent_kernels.fp8_linear.reference import fp8_gemm_ref
from consistent_kernels.quantization.reference import quantize_rows_ref


def fp8_expert_outputs_ref(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    scale_format: str,
    layout: str = "contiguous",
) -> torch.Tensor:
    """See `consistent_kernels.fp8_experts.api.fp8_expert_outputs`."""
    tokens, slots = ids.shape
    order, counts = sorted_rows(ids, w13.shape[0])
    rows = x[order // slots]
    y = x.new_zeros((tokens * slots, w2.shape[1]))
    for expert, part, mine in laid_out(rows, counts, tokens, layout, "fp8_experts"):
        # A row is quantized by itself: here or before it is laid out, it is the same.
        gate_up = fp8_gemm_ref(
            *quantize_rows_ref(mine, scale_format), w13[expert], w13_scale[expert], x.dtype
        )
        hidden = gated_activation(*gate_up.chunk(2, dim=1), limit)
        y[order[part]] = fp8_gemm_ref(
            *quantize_rows_ref(hidden, scale_format), w2[expert], w2_scale[expert], x.dtype
        )
    return y.view(tokens, slots, w2.shape[1])
