"""Composed configurations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from verl_configs import SHIPPED

BASE = "true_on_policy_grpo_fsdp"


def composed(name: str = BASE, *overrides: str) -> Any:
    """Return a shipped configuration by its file's stem."""
    pytest.importorskip("verl", reason="the verl extra is not installed")
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(SHIPPED[name].parent), version_base=None):
        return compose(name, overrides=list(overrides))


@pytest.fixture(scope="session")
def base() -> Any:
    """The shipped configuration, composed once."""
    return composed()


@pytest.fixture(scope="session")
def megatron_base() -> Any:
    """The shipped configuration of the Megatron engine, composed once."""
    return composed("true_on_policy_grpo_megatron")


@pytest.fixture
def broken_keys(base: Any) -> Callable[..., Sequence[str]]:
    """Return keys(changes): the keys that the preflight names once keys have other values."""
    from omegaconf import OmegaConf

    from train_bridge.verl.preflight import violations

    def keys(changes: dict[str, Any] | None = None, of: Any = None) -> list[str]:
        config = copy.deepcopy(base if of is None else of)
        for key, value in (changes or {}).items():
            OmegaConf.update(config, key, value, force_add=True)
        return [found.key for found in violations(config)]

    return keys
