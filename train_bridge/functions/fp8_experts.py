"""Autograd for FP8 experts: straight-through, onto the masters."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.fp8_experts import Fp8ExpertWeight, fp8_experts, fp8_experts_bwd
from train_bridge.functions.ambient import OpFunction


class Fp8ExpertsFunction(OpFunction):
    """y = fp8_experts(x, w13, w2, ids, weights, shared).

    Gradients: x and shared in their dtype, w13 and w2 in the masters', weights in fp32. `quantized`
    are `quantize_expert_weight` of the same weight version; they carry no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        quantized: tuple[Fp8ExpertWeight, Fp8ExpertWeight],
        scale_format: str,
        limit: float | None,
        impl: str,
    ) -> torch.Tensor:
        kept = [part for weight in quantized for part in (weight.values, weight.scale)]
        ctx.save_for_backward(x, ids, weights, *kept)
        ctx.scale_format, ctx.limit, ctx.impl = scale_format, limit, impl
        ctx.master_dtypes = (w13.dtype, w2.dtype)
        return fp8_experts(
            x,
            *quantized,
            ids,
            weights,
            shared,
            scale_format=scale_format,
            limit=limit,
            layout="fastest",
            impl=impl,
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, ids, weights, values13, scale13, values2, scale2 = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[index] for index in (0, 1, 2, 4))
        grad_x, grad_w13, grad_w2, grad_weights = fp8_experts_bwd(
            grad,
            x,
            Fp8ExpertWeight(values13, scale13),
            Fp8ExpertWeight(values2, scale2),
            ids,
            weights,
            scale_format=ctx.scale_format,
            limit=ctx.limit,
            needs=needs,
            impl=ctx.impl,
        )
        if grad_w13 is not None:
            grad_w13 = grad_w13.to(ctx.master_dtypes[0])
        if grad_w2 is not None:
            grad_w2 = grad_w2.to(ctx.master_dtypes[1])
        grad_shared = grad if ctx.needs_input_grad[5] else None
        return grad_x, grad_w13, grad_w2, None, grad_weights, grad_shared, None, None, None, None
