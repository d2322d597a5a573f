"""Autograd for experts spread over ranks: forward and backward move rows and add nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from consistent_kernels.errors import invalid
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
from consistent_kernels.fp8_experts import Fp8ExpertWeight, fp8_expert_outputs, fp8_experts_bwd
from consistent_kernels.fp8_experts.spec import experts_of
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

    def require_own(self, name: str, experts: int) -> None:
        """Raise InvalidInputError unless weights of so many experts can be this rank's alone."""
        mine = self.placement.experts(self.exchange.rank)
        if experts != mine.stop - mine.start:
            raise invalid(
                "expert_parallel",
                name,
                f"of {mine.stop - mine.start} experts ({mine.start} to {mine.stop - 1})",
                experts,
            )


Gradients = Callable[..., tuple[torch.Tensor | None, ...]]
"""Of one slot a row: (grad_y, rows, ids, weights of one) to fp32 (grad_rows, w13, w2, weights)."""


def _exchanged(
    ctx: Any,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    outputs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    impl: str,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the layer's result [T, H], and what its backward reads beside the weights."""
    exchange, placement = ctx.parallel.exchange, ctx.parallel.placement
    arrived = dispatch(x, ids, exchange, placement)
    local = (arrived.experts - ctx.parallel.first)[:, None].contiguous()
    rows = outputs(arrived.values, local)
    y = give_back(Travelled(rows[:, 0], arrived.fields), exchange, ids)
    out = combine(y, ids, weights, shared, impl=impl)
    return out, (arrived.values, arrived.fields, ids, weights, y)


def _exchanged_back(
    ctx: Any, grad: torch.Tensor, kept: tuple[torch.Tensor, ...], gradients: Gradients
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of (x, w13, w2, ids, weights, shared) in the dtypes of their tensors."""
    rows, fields, ids, weights, y = kept
    exchange, placement = ctx.parallel.exchange, ctx.parallel.placement
    per_slot = grad.float()[:, None]
    grad_weights = torch.where(ids >= 0, (per_slot * y.float()).sum(-1), 0.0)
    weighted = (per_slot * weights[..., None]).to(grad.dtype)
    arrived = in_order_of(dispatch_slots(weighted, ids, exchange, placement), fields)
    local = (arrived.experts - ctx.parallel.first)[:, None].contiguous()
    ones = torch.ones(local.shape, dtype=torch.float32, device=local.device)
    grad_rows, grad_w13, grad_w2, _ = gradients(arrived.values, rows, local, ones)
    slots = give_back(Travelled(grad_rows, fields), exchange, ids)
    grad_x = slots[:, 0].clone()
    for slot in range(1, slots.shape[1]):
        grad_x += slots[:, slot]
    masters = (grad_x, grad_w13, grad_w2)
    rounded = (each.to(dtype) for each, dtype in zip(masters, ctx.dtypes, strict=True))
    return (*rounded, None, grad_weights, grad if ctx.needs_input_grad[5] else None)


_NEEDS = (True, True, True, False)


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
        parallel.require_own("w13", w13.shape[0])
        parallel.require_own("prepared", prepared[0].shape[0])
        ctx.parallel, ctx.limit, ctx.impl = parallel, limit, impl
        ctx.dtypes = (x.dtype, w13.dtype, w2.dtype)

        def outputs(rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
            return expert_outputs(rows, *prepared, local, limit=limit, impl=impl)

        out, kept = _exchanged(ctx, x, ids, weights, shared, outputs, impl)
        ctx.save_for_backward(*kept, *prepared)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        *kept, w13, w2 = ctx.saved_tensors
        options = {"limit": ctx.limit, "needs": _NEEDS, "impl": ctx.impl}

        def gradients(grad_y: torch.Tensor, rows: torch.Tensor, *routed: torch.Tensor) -> tuple:
            return experts_bwd(
                grad_y, rows, w13, w2, *routed, grad_x_dtype=torch.float32, **options
            )

        return (*_exchanged_back(ctx, grad, kept, gradients), *(None,) * 4)


class Fp8ExpertParallelFunction(OpFunction):
    """`Fp8ExpertsFunction` with this rank's experts alone, as `ExpertParallelFunction` has them.

    A row travels in the model dtype and is quantized at its expert's rank, by itself, to the bytes
    that its token's rank would have made of it.
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
        quantized: tuple[Fp8ExpertWeight, Fp8ExpertWeight],
        scale_format: str,
        parallel: ExpertParallel,
        limit: float | None,
        impl: str,
    ) -> torch.Tensor:
        parallel.require_own("w13", w13.shape[0])
        parallel.require_own("quantized", quantized[0].values.shape[0])
        ctx.parallel, ctx.dtypes = parallel, (x.dtype, w13.dtype, w2.dtype)
        ctx.options = {"scale_format": scale_format, "limit": limit, "impl": impl}

        def outputs(rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
            return fp8_expert_outputs(rows, *quantized, local, layout="fastest", **ctx.options)

        out, kept = _exchanged(ctx, x, ids, weights, shared, outputs, experts_of(impl))
        ctx.save_for_backward(*kept, *(part for w in quantized for part in (w.values, w.scale)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        *kept, values13, scale13, values2, scale2 = ctx.saved_tensors
        both = (Fp8ExpertWeight(values13, scale13), Fp8ExpertWeight(values2, scale2))
        options = {"needs": _NEEDS, "grad_x_dtype": torch.float32, **ctx.options}

        def gradients(grad_y: torch.Tensor, rows: torch.Tensor, *routed: torch.Tensor) -> tuple:
            return fp8_experts_bwd(grad_y, rows, *both, *routed, **options)

        return (*_exchanged_back(ctx, grad, kept, gradients), *(None,) * 5)
