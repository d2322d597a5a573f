"""Autograd for silu(gate) * up."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.silu_and_mul import silu_and_mul, silu_and_mul_bwd
from train_bridge.functions.ambient import OpFunction


class SiluAndMulFunction(OpFunction):
    """y = silu_and_mul(gate, up)."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, impl: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.impl = impl
        return silu_and_mul(gate, up, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = silu_and_mul_bwd(grad_y, gate, up, impl=ctx.impl)
        return grad_gate, grad_up, None
