"""Autograd for rotary: the backward rotates by the opposite angle."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.rotary import RopeParameters, rotary, rotary_bwd
from train_bridge.functions.ambient import OpFunction


class RotaryFunction(OpFunction):
    """(q, k) = rotary(positions, q, k)."""

    @staticmethod
    def forward(
        ctx: Any,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        rope: RopeParameters,
        impl: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(positions)
        ctx.rope, ctx.impl = rope, impl
        return rotary(positions, q, k, rope=rope, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> tuple[Any, ...]:
        (positions,) = ctx.saved_tensors
        grads = rotary_bwd(positions, grad_q, grad_k, rope=ctx.rope, impl=ctx.impl)
        return None, *grads, None, None
