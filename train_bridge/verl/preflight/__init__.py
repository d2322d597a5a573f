"""Everything in a verl configuration that would part rollout and training, found before Ray starts.

Each rule yields `Violation`s that name the key to change; `check` raises one error with all.
"""

from __future__ import annotations

from omegaconf import DictConfig

from consistent_kernels.errors import ConfigurationError
from train_bridge.verl.preflight import (
    checkpoint,
    engine_options,
    files,
    installation,
    keys,
    policy,
    relations,
)
from train_bridge.verl.preflight.view import View, Violation

__all__ = ["Violation", "check", "violations"]

_RULES = (
    keys.violations,
    engine_options.violations,
    relations.violations,
    policy.violations,
    checkpoint.violations,
    installation.violations,
)


def violations(config: DictConfig, *, to_run: bool = False) -> list[Violation]:
    """Return every broken rule of a composed configuration, in a fixed order.

    Args:
        config: composed.
        to_run: whether it is about to run: then model and data must be given, too.
    """
    view = View(config)
    found = [item for rule in _RULES for item in rule(view)]
    return [*found, *files.violations(view, to_run=to_run)]


def check(config: DictConfig, *, to_run: bool = False) -> None:
    """Raise ConfigurationError listing every broken rule with the key to change."""
    found = violations(config, to_run=to_run)
    if found:
        raise ConfigurationError([str(item) for item in found], "true on-policy configuration")
