"""What rules are made of: a look into a configuration, and a violation that names a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

SECTIONS = {"fsdp2": "fsdp_config", "megatron": "megatron"}
"""Strategies that we have an engine for, and where verl keeps its configuration."""


@dataclasses.dataclass(frozen=True)
class Violation:
    """One broken rule.

    Attributes:
        key: what to change: a key of the configuration, a variable or a package.
        value: what it is now.
        why: what would part the two sides.
        use: what to set it to.
    """

    key: str
    value: Any
    why: str
    use: str

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.why}; use {self.use}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return dataclasses.asdict(self) | {"value": _plain(self.value)}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A key that may have only some values.

    Null is what verl takes for False and for no name; elsewhere it is a value like any other.

    Attributes:
        key: dotted.
        allowed: values, the first of which is recommended.
        why: what another value would do.
        required: whether the key must be there; else verl's or vLLM's default is harmless.
    """

    key: str
    allowed: tuple[Any, ...]
    why: str
    required: bool = False

    def violations(self, view: View) -> Iterator[Violation]:
        """Yield at most one."""
        value = view.value(self.key, ABSENT if self.required else self.allowed[0])
        if value is None and (self.allowed[0] is False or self.allowed[0] == ""):
            return
        if not any(same(value, allowed) for allowed in self.allowed):
            yield Violation(self.key, value, self.why, repr(self.allowed[0]))


def same(value: Any, allowed: Any) -> bool:
    """Return whether two values are one in a configuration, where True is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def is_integer(value: Any) -> bool:
    """Return whether a value is a whole number in a configuration, where True is not 1."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a value is an integer of at least `least`."""
    return is_integer(value) and value >= least


class _Absent:
    def __repr__(self) -> str:
        return "<absent>"


ABSENT = _Absent()
"""The value of a key that is not there."""


class View:
    """Reads a composed configuration by dotted keys; interpolations are resolved."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    def value(self, key: str, default: Any = ABSENT) -> Any:
        """Return the value of `key`, which may be null; `default` where it is absent.

        A value that cannot be resolved is returned as it stands: no rule takes it for a good one.
        """
        try:
            return OmegaConf.select(self.config, key, default=default)
        except OmegaConfBaseException:
            return f"<{key} cannot be resolved>"

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`; `default` where it is absent, null or cannot be resolved."""
        try:
            value = OmegaConf.select(self.config, key, default=None)
        except OmegaConfBaseException:
            return default
        return default if value is None else value

    def integers(self, *keys: str) -> list[int] | None:
        """Return the values of `keys`; None where one is no integer (a rule of its own says so)."""
        values = [self.get(key, 0) for key in keys]
        return values if all(map(is_integer, values)) else None

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response together; 0 where one is no integer."""
        rollout = "actor_rollout_ref.rollout"
        return sum(self.integers(f"{rollout}.prompt_length", f"{rollout}.response_length") or ())

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a section as a dict, {} where it is absent."""
        value = self.get(key, {})
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else {}

    @property
    def strategy(self) -> str:
        """The training backend: "fsdp2", "megatron", ..."""
        return str(self.get("actor_rollout_ref.actor.strategy"))

    @property
    def section(self) -> str:
        """The key under actor and ref that holds the training engine's configuration."""
        return SECTIONS.get(self.strategy, "fsdp_config")

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy runs."""
        return bool(
            self.get("actor_rollout_ref.actor.use_kl_loss")
            or self.get("algorithm.use_kl_in_reward")
        )
