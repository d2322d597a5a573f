"""Autograd for megatron-core's fused qkv: the forward reads the engine's row order."""

from __future__ import annotations

from typing import Any

import torch

from train_bridge.functions.linear import LinearFunction


class FusedQKVFunction(torch.autograd.Function):
    """y = linear(x, prepared, bias[rows]): columns come out as all of q, all of k, all of v.

    Args of `apply`: x [T, K]; master, interleaved [N, K]; bias, interleaved [N], or None;
    prepared, of the reordered master; rows [N] int64, `stacked = interleaved[rows]`; impl.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        master: torch.Tensor,
        bias: torch.Tensor | None,
        prepared: torch.Tensor,
        rows: torch.Tensor,
        impl: str,
    ) -> torch.Tensor:
        ctx.rows = rows
        stacked = bias.index_select(0, rows) if bias is not None else None
        return LinearFunction.forward(ctx, x, master, stacked, prepared, impl, None)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        grad_x, grad_weight, grad_bias, *_ = LinearFunction.backward(ctx, grad_y)
        return grad_x, _at(ctx.rows, grad_weight), _at(ctx.rows, grad_bias), None, None, None


def _at(rows: torch.Tensor, stacked: torch.Tensor | None) -> torch.Tensor | None:
    return None if stacked is None else torch.empty_like(stacked).index_copy_(0, rows, stacked)
