"""The determinism switch leaves no trace, and says when it would come too late."""

import pytest
import torch

from consistent_kernels.errors import ConfigurationError
from train_bridge import env
from train_bridge.determinism import deterministic_gradients


def settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_deterministic_gradients_are_on_inside_and_restored() -> None:
    before = settings()
    inside = []

    def fail() -> None:
        with deterministic_gradients("cpu"):
            inside.append(settings())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [(True, False, False)]
    assert settings() == before


def test_deterministic_gradients_reject_a_late_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.CUBLAS_WORKSPACE, raising=False)
    with (
        pytest.raises(ConfigurationError, match="start the process with CUBLAS_WORKSPACE_CONFIG"),
        deterministic_gradients("cuda"),
    ):
        pass
    monkeypatch.setenv(env.CUBLAS_WORKSPACE, ":4096:8")
    assert env.cublas_is_deterministic()
