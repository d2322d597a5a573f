"""Autograd for megatron-core's fused qkv: the forward reads the engine's row order."""

from __future__ import annotations

from typing import Any

import torch

from train_bridge.functions.linear import LinearFunction


class FusedQKVFunction(torch.autograd.Function):
    """y = linear(x, prepared, bias[rows]): columns come out as all of q, all of k, all of v.

    Args of `apply`: x [T, K]; master, interleaved [N, K]; bias, interleaved [N], or None;
    prepared [n, K], `master[rows]` rounded; rows [n] int64, all rows or those of q, k or v; impl.
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
        ctx.rows, ctx.all_rows = rows, master.shape[0]
        stacked = bias.index_select(0, rows) if bias is not None else None
        return LinearFunction.forward(ctx, x, master, stacked, prepared, impl, None)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        grad_x, grad_weight, grad_bias, *_ = LinearFunction.backward(ctx, grad_y)
        grads = (_at(ctx.rows, ctx.all_rows, grad) for grad in (grad_weight, grad_bias))
        return grad_x, *grads, None, None, None


def _at(rows: torch.Tensor, total: int, stacked: torch.Tensor | None) -> torch.Tensor | None:
    if stacked is None:
        return None
    return stacked.new_zeros((total, *stacked.shape[1:])).index_copy_(0, rows, stacked)
