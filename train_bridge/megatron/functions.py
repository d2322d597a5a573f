"""Autograd where megatron-core lays weights out otherwise: fused qkv, one weight an expert."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.experts import experts, experts_bwd
from train_bridge.functions.ambient import OpFunction
from train_bridge.functions.linear import LinearFunction


class FusedQKVFunction(OpFunction):
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


class ListedExpertsFunction(OpFunction):
    """`ExpertsFunction` with a master for each expert.

    Args of `apply`: x [T, H]; ids [T, K]; weights [T, K] fp32; prepared, gate-up [E, 2 I, H] and
    down [E, H, I]; impl; then the E masters of gate-up and the E of down.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        prepared: tuple[torch.Tensor, torch.Tensor],
        impl: str,
        *masters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *prepared, ids, weights)
        ctx.impl, ctx.dtypes = impl, [master.dtype for master in masters]
        return experts(x, *prepared, ids, weights, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, w13, w2, ids, weights = ctx.saved_tensors
        count = w13.shape[0]
        wanted = ctx.needs_input_grad[5:]
        needs = (
            ctx.needs_input_grad[0],
            any(wanted[:count]),
            any(wanted[count:]),
            ctx.needs_input_grad[2],
        )
        grad_x, grad_w13, grad_w2, grad_weights = experts_bwd(
            grad, x, w13, w2, ids, weights, needs=needs, impl=ctx.impl
        )
        rows = [
            row
            for stacked in (grad_w13, grad_w2)
            for row in ([None] * count if stacked is None else stacked.unbind())
        ]
        grads = [
            row.to(dtype) if need else None
            for row, dtype, need in zip(rows, ctx.dtypes, wanted, strict=True)
        ]
        return grad_x, None, grad_weights, None, None, *grads
