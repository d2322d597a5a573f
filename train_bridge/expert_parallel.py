"""Autograd for experts spread over ranks: forward and backward move rows and add nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from consistent_kernels.expert_parallel import (
    Exchange,
    ExpertPlacement,
    Travelled,
    dispatch,
    dispatch_slots,
    give_back,
    in_order_of,
)
from consistent_kernels.experts import combine, expert_outputs, experts_bwd
from train_bridge.functions.ambient import OpFunction


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """Who holds which experts, and how rows get there."""

    exchange: Exchange
    placement: ExpertPlacement

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return self.placement.first(self.exchange.rank)


class ExpertParallelFunction(OpFunction):
    """`ExpertsFunction` with this rank's experts alone; all ranks run both ways together.

    The forward has the bits of one rank with all experts. Gradients of weights add the rows of all
    ranks at the expert's rank; the gradient of x travels in fp32 and is summed in slot order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        prepared: tuple[torch.Tensor, torch.Tensor],
        parallel: ExpertParallel,
        limit: float | None,
        impl: str,
    ) -> torch.Tensor:
        arrived = dispatch(x, ids, parallel.exchange, parallel.placement)
        local = (arrived.experts - parallel.first)[:, None].contiguous()
        rows = expert_outputs(arrived.values, *prepared, local, limit=limit, impl=impl)
        y = give_back(Travelled(rows[:, 0], arrived.fields), parallel.exchange, ids)
        ctx.save_for_backward(arrived.values, arrived.fields, *prepared, ids, weights, y)
        ctx.parallel, ctx.limit, ctx.impl = parallel, limit, impl
        ctx.dtypes = (x.dtype, w13.dtype, w2.dtype)
        return combine(y, ids, weights, shared, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        rows, fields, w13, w2, ids, weights, y = ctx.saved_tensors
        exchange, placement = ctx.parallel.exchange, ctx.parallel.placement
        per_slot = grad.float()[:, None]
        grad_weights = torch.where(ids >= 0, (per_slot * y.float()).sum(-1), 0.0)
        weighted = (per_slot * weights[..., None]).to(grad.dtype)
        arrived = in_order_of(dispatch_slots(weighted, ids, exchange, placement), fields)
        local = (arrived.experts - ctx.parallel.first)[:, None].contiguous()
        grad_rows, grad_w13, grad_w2, _ = experts_bwd(
            arrived.values,
            rows,
            w13,
            w2,
            local,
            torch.ones(local.shape, dtype=torch.float32, device=local.device),
            limit=ctx.limit,
            needs=(True, True, True, False),
            grad_x_dtype=torch.float32,
            impl=ctx.impl,
        )
        slots = give_back(Travelled(grad_rows, fields), exchange, ids)
        grad_x = slots[:, 0].clone()
        for slot in range(1, slots.shape[1]):
            grad_x += slots[:, slot]
        return (
            grad_x.to(ctx.dtypes[0]),
            grad_w13.to(ctx.dtypes[1]),
            grad_w2.to(ctx.dtypes[2]),
            None,
            grad_weights,
            grad if ctx.needs_input_grad[5] else None,
            None,
            None,
            None,
            None,
        )
