"""Autograd for the hyper-connection maps: the forward returns the kernel's own tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from consistent_kernels.hyper_connections import (
    hc_head,
    hc_head_bwd,
    hc_post,
    hc_post_bwd,
    hc_pre,
    hc_pre_bwd,
)
from train_bridge.functions.ambient import OpFunction


@dataclasses.dataclass(frozen=True)
class HyperConnectionParameters:
    """The numbers of a model's hyper-connections, as `hc_pre` takes them."""

    norm_eps: float
    eps: float
    iterations: int
    post_multiplier: float = 2.0


class HyperPreFunction(OpFunction):
    """(layer_input, post, comb) = hc_pre(x, fn, scale, base); fn, scale, base are fp32 masters."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        params: HyperConnectionParameters,
        impl: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, fn, scale, base)
        ctx.params, ctx.impl = params, impl
        return hc_pre(x, fn, scale, base, **dataclasses.asdict(params), impl=impl)

    @staticmethod
    def backward(
        ctx: Any, grad_input: torch.Tensor, grad_post: torch.Tensor, grad_comb: torch.Tensor
    ) -> tuple[Any, ...]:
        grads = hc_pre_bwd(
            grad_input,
            grad_post,
            grad_comb,
            *ctx.saved_tensors,
            **dataclasses.asdict(ctx.params),
            impl=ctx.impl,
        )
        return (*grads, None, None)


class HyperPostFunction(OpFunction):
    """out = hc_post(y, x, post, comb)."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        impl: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(y, x, post, comb)
        ctx.impl = impl
        return hc_post(y, x, post, comb, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        return (*hc_post_bwd(grad_out, *ctx.saved_tensors, impl=ctx.impl), None)


class HyperHeadFunction(OpFunction):
    """out = hc_head(x, fn, scale, base)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        fn: torch.Tensor,
        scale: torch.Tensor,
        base: torch.Tensor,
        norm_eps: float,
        eps: float,
        impl: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, fn, scale, base)
        ctx.numbers, ctx.impl = {"norm_eps": norm_eps, "eps": eps}, impl
        return hc_head(x, fn, scale, base, **ctx.numbers, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        grads = hc_head_bwd(grad_out, *ctx.saved_tensors, **ctx.numbers, impl=ctx.impl)
        return (*grads, None, None, None)
