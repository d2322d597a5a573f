"""Autograd for interleaved rotary: the gradient is the opposite rotation, rounded once."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.interleaved_rotary import interleaved_rotary
from consistent_kernels.rotary import RopeParameters
from train_bridge.functions.ambient import OpFunction


class InterleavedRotaryFunction(OpFunction):
    """y = interleaved_rotary(positions, x, inverse)."""

    @staticmethod
    def forward(
        ctx: Any,
        positions: torch.Tensor,
        x: torch.Tensor,
        rope: RopeParameters,
        inverse: bool,
        impl: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(positions)
        ctx.rope, ctx.inverse, ctx.impl = rope, inverse, impl
        return interleaved_rotary(positions, x, rope=rope, inverse=inverse, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        (positions,) = ctx.saved_tensors
        grad_x = interleaved_rotary(
            positions, grad_y, rope=ctx.rope, inverse=not ctx.inverse, impl=ctx.impl
        )
        return None, grad_x, None, None, None
