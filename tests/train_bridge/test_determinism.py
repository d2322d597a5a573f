"""The determinism switch: gradients repeat, it leaves no trace, and says when it is too late."""

import json
from collections.abc import Callable

import pytest
import repeated_gradients
import torch
from child_process import run_python
from repeated_gradients import differing_gradients
from tiny_models import FAMILIES

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_gradient_is_run_to_run_stable(
    family: str, dtype: torch.dtype, make_bridged: Callable
) -> None:
    assert differing_gradients(make_bridged(family, dtype)) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_gradient_is_run_to_run_stable_on_cuda() -> None:
    done = run_python(repeated_gradients.__file__, **{env.CUBLAS_WORKSPACE: ":4096:8"})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(FAMILIES)
    assert all(names == [] for names in found.values()), found


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_control_one_bit_of_one_gradient_shows(name: str, make_bridged: Callable) -> None:
    def spoil(model: torch.nn.Module, turn: int) -> None:
        if turn == 1:
            model.get_parameter(name).grad.view(torch.int32).view(-1)[-1] ^= 1

    assert differing_gradients(make_bridged("qwen3", torch.float32), 2, spoil) == [name]
