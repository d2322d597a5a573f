"""Autograd for a grouped linear: rounded weights forward, masters' gradients back."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.grouped_linear import grouped_linear, grouped_linear_bwd
from train_bridge.functions.ambient import OpFunction


class GroupedLinearFunction(OpFunction):
    """y = grouped_linear(x, master rounded to the dtype of x)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, master: torch.Tensor, impl: str) -> torch.Tensor:
        weight = master.to(x.dtype).contiguous()
        ctx.save_for_backward(x, weight)
        ctx.impl, ctx.master_dtype = impl, master.dtype
        return grouped_linear(x, weight, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = grouped_linear_bwd(grad_y, x, weight, impl=ctx.impl)
        return grad_x, grad_weight.to(ctx.master_dtype), None
