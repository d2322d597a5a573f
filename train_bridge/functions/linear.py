"""Autograd for linear: the forward reads a prepared weight, the gradient goes to the master."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.linear import linear, linear_bwd
from train_bridge.functions.ambient import OpFunction


class LinearFunction(OpFunction):
    """y = linear(x, prepared, bias). Gradients: x in its dtype, weight and bias in the master's.

    `prepared` is `prepare_weight(master)` of the same weight version; it carries no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        master: torch.Tensor,
        bias: torch.Tensor | None,
        prepared: torch.Tensor,
        impl: str,
        out_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, prepared)
        ctx.impl = impl
        ctx.master_dtype = master.dtype
        ctx.bias_dtype = bias.dtype if bias is not None else None
        rounded = bias.to(x.dtype) if bias is not None else None
        return linear(x, prepared, rounded, impl=impl, out_dtype=out_dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        x, prepared = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        grad_x, grad_weight, grad_bias = linear_bwd(
            grad_y, x, prepared, needs=needs, impl=ctx.impl, weight_dtype=ctx.master_dtype
        )
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None
