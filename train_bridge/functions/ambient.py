"""Keeps ambient settings out of our ops: autocast rounds operands, a default dtype temporaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def plain_settings(device_type: str) -> Iterator[None]:
    """Run the body with autocast off and float32 as default dtype."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)


def isolated(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` with plain settings in forward and in backward.

    Both matter: the engine runs a backward under the autocast state of its caller, so
    `loss.backward()` inside `torch.autocast` would compute gradients from rounded operands.
    """

    class Isolated(function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            return _call(function.forward, ctx, args)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return _call(function.backward, ctx, grads)

    Isolated.__name__ = function.__name__
    Isolated.__qualname__ = function.__qualname__
    return Isolated.apply


def _call(call: Callable[..., Any], ctx: Any, args: tuple[Any, ...]) -> Any:
    device_type = next((arg.device.type for arg in args if isinstance(arg, torch.Tensor)), "cpu")
    if torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled(device_type):
        return call(ctx, *args)
    with plain_settings(device_type):
        return call(ctx, *args)
