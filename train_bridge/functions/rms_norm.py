"""Autograd for RMSNorm: the forward returns the kernel's own tensors."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_bwd
from train_bridge.functions.ambient import OpFunction


class RMSNormFunction(OpFunction):
    """y = rms_norm(x, weight). Gradients: x in its dtype, weight in the master's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, impl: str
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.impl = eps, impl
        return rms_norm(x, weight.to(x.dtype), eps, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = rms_norm_bwd(grad_y, x, weight.to(x.dtype), ctx.eps, impl=ctx.impl)
        return grad_x, grad_weight.to(weight.dtype), None, None


class AddRMSNormFunction(OpFunction):
    """(y, s) = add_rms_norm(x, residual, weight). Both inputs receive the same gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        impl: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, total = add_rms_norm(x, residual, weight.to(x.dtype), eps, impl=impl)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.impl = eps, impl
        return y, total

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor, grad_total: torch.Tensor) -> tuple[Any, ...]:
        total, weight = ctx.saved_tensors
        grad_sum, grad_weight = rms_norm_bwd(
            grad_y, total, weight.to(total.dtype), ctx.eps, impl=ctx.impl, grad_sum=grad_total
        )
        return grad_sum, grad_sum, grad_weight.to(weight.dtype), None, None
