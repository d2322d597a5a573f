"""Autograd for the router: the gradient flows through the weights, the choice has none."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.router import RouterParameters, router, router_bwd
from train_bridge.functions.ambient import OpFunction


class RouterFunction(OpFunction):
    """(ids, weights) = router(logits, bias)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        forced: torch.Tensor | None,
        valid: torch.Tensor | None,
        parameters: RouterParameters,
        impl: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = router(
            logits, bias, parameters=parameters, forced=forced, valid=valid, impl=impl
        )
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(logits, ids)
        ctx.parameters, ctx.impl = parameters, impl
        return ids, weights

    @staticmethod
    def backward(ctx: Any, _: Any, grad_weights: torch.Tensor) -> tuple[Any, ...]:
        logits, ids = ctx.saved_tensors
        grad = router_bwd(grad_weights, logits, ids, parameters=ctx.parameters, impl=ctx.impl)
        return grad, None, None, None, None, None
