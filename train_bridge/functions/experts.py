"""Autograd for the experts: the forward reads prepared weights, gradients go to the masters."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.experts import experts, experts_bwd
from train_bridge.functions.ambient import OpFunction


class ExpertsFunction(OpFunction):
    """y = experts(x, w13, w2, ids, weights, shared).

    Gradients: x and shared in their dtype, w13 and w2 in the masters', weights in fp32. `prepared`
    are `prepare_expert_weight` of the same weight version; they carry no gradient. Ids of a token
    are distinct.
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
        prepared: tuple[torch.Tensor, torch.Tensor],
        limit: float | None,
        impl: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *prepared, ids, weights)
        ctx.limit, ctx.impl = limit, impl
        ctx.master_dtypes = (w13.dtype, w2.dtype)
        # A router chooses no expert twice, so any layout will do.
        return experts(x, *prepared, ids, weights, shared, limit=limit, layout="fastest", impl=impl)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, w13, w2, ids, weights = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[index] for index in (0, 1, 2, 4))
        grad_x, grad_w13, grad_w2, grad_weights = experts_bwd(
            grad, x, w13, w2, ids, weights, limit=ctx.limit, needs=needs, impl=ctx.impl
        )
        if grad_w13 is not None:
            grad_w13 = grad_w13.to(ctx.master_dtypes[0])
        if grad_w2 is not None:
            grad_w2 = grad_w2.to(ctx.master_dtypes[1])
        grad_shared = grad if ctx.needs_input_grad[5] else None
        return grad_x, grad_w13, grad_w2, None, grad_weights, grad_shared, None, None, None
