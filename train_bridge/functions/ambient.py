"""Keeps ambient settings out of our ops: autocast rounds operands, a default dtype temporaries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable


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


class OpFunction(torch.autograd.Function):
    """Base of our Functions: plain settings in forward and in backward, and no second backward.

    Both need them: the engine runs a backward under the autocast state of its caller, so
    `loss.backward()` inside `torch.autocast` would compute gradients from rounded operands. A
    backward rounds and calls kernels, which autograd cannot see into: to differentiate it again is
    an error, instead of a gradient that lacks terms.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        methods = vars(cls)
        if "forward" in methods:
            cls.forward = staticmethod(_plain(cls.forward))
        if "backward" in methods:
            cls.backward = staticmethod(once_differentiable(_plain(cls.backward)))


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def plain(ctx: Any, *args: Any) -> Any:
        return _call(method, ctx, args)

    return plain


def _call(call: Callable[..., Any], ctx: Any, args: tuple[Any, ...]) -> Any:
    device_type = next((arg.device.type for arg in args if isinstance(arg, torch.Tensor)), "cpu")
    if torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled(device_type):
        return call(ctx, *args)
    with plain_settings(device_type):
        return call(ctx, *args)
