"""Everything in a verl configuration that would part rollout and training, found before Ray starts.

Each rule yields `Violation`s that name the key to change; `check` raises one error with all.
"""

from __future__ import annotations

from omegaconf import DictConfig

from consistent_kernels.errors import ConfigurationError
from train_bridge.verl.preflight import checkpoint, installation, keys, relations
from train_bridge.verl.preflight.view import View, Violation

__all__ = ["Violation", "check", "violations"]

_RULES = (keys.violations, relations.violations, checkpoint.violations, installation.violations)


def violations(config: DictConfig) -> list[Violation]:
    """Return every broken rule of a composed configuration, in a fixed order."""
    view = View(config)
    return [found for rule in _RULES for found in rule(view)]


def check(config: DictConfig) -> None:
    """Raise ConfigurationError listing every broken rule with the key to change."""
    found = violations(config)
    if found:
        raise ConfigurationError([str(item) for item in found], "true on-policy configuration")
