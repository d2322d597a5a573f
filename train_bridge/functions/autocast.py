"""Keeps ambient autocast out of our ops: inside one it would round the operands of their GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def without_autocast(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` with autocast switched off in forward and in backward.

    Both matter: the engine runs a backward under the autocast state of its caller, so
    `loss.backward()` inside `torch.autocast` would compute gradients from rounded operands.
    """

    class Guarded(function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            return _exactly(function.forward, ctx, args)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return _exactly(function.backward, ctx, grads)

    Guarded.__name__ = function.__name__
    Guarded.__qualname__ = function.__qualname__
    return Guarded.apply


def _exactly(call: Callable[..., Any], ctx: Any, args: tuple[Any, ...]) -> Any:
    device_type = next((arg.device.type for arg in args if isinstance(arg, torch.Tensor)), "cpu")
    if not torch.is_autocast_enabled(device_type):
        return call(ctx, *args)
    with torch.autocast(device_type, enabled=False):
        return call(ctx, *args)
