"""Applies patches once, after checking that vLLM still has the code they were written for."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from consistent_kernels.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class Patch:
    """One replaced method.

    Attributes:
        module, owner, attribute: what is replaced.
        signature: `str(inspect.signature(...))` of the stock method, parameter names only.
        reason: why no extension point serves.
        lines: where vLLM 0.25.1 has it.
        removal: what makes the patch unnecessary.
        wrap: stock function -> replacement.
    """

    module: str
    owner: str
    attribute: str
    signature: tuple[str, ...]
    reason: str
    lines: str
    removal: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    @property
    def name(self) -> str:
        """Dotted name of the replaced method."""
        return f"{self.module}.{self.owner}.{self.attribute}"


_STOCK: dict[str, tuple[Patch, Callable[..., Any]]] = {}


def apply(patch: Patch) -> None:
    """Replace the method; a second call does nothing.

    Raises:
        UnsupportedError: the stock method takes other parameters than the patch knows.
    """
    if patch.name in _STOCK:
        return
    owner = getattr(importlib.import_module(patch.module), patch.owner)
    stock = getattr(owner, patch.attribute)
    found = tuple(inspect.signature(stock).parameters)
    if found != patch.signature:
        raise UnsupportedError(f"patch of {patch.name}", f"signature {found}", [patch.signature])
    setattr(owner, patch.attribute, patch.wrap(stock))
    _STOCK[patch.name] = (patch, stock)


def remove_all() -> None:
    """Put every stock method back."""
    for patch, stock in _STOCK.values():
        setattr(getattr(importlib.import_module(patch.module), patch.owner), patch.attribute, stock)
    _STOCK.clear()


def applied() -> dict[str, str]:
    """Return {replaced method: reason} of this process."""
    return {name: patch.reason for name, (patch, _) in _STOCK.items()}
