"""torch.compile around a bridged model, or a part of it, changes no bit and breaks nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, token_logprobs
from train_bridge.hf import bridge_state

IDS = torch.arange(5, 45).view(2, 20)


def scored(model: nn.Module) -> torch.Tensor:
    return token_logprobs(model, IDS.to(next(model.parameters()).device)).log_probs


def wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="inductor")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="inductor")
    return model


def by_layer(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(backend="inductor")
        layer.mlp.compile(backend="inductor")
    return model


@pytest.mark.parametrize("compiled", [wrapped, in_place, by_layer])
def test_compiled_equals_eager(compiled: Callable, device: str, make_bridged: Callable) -> None:
    model = make_bridged("qwen3", torch.float32, device)
    expected = scored(model)
    (expected.sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    found = scored(compiled(model))
    found.sum().backward()
    assert_bitwise_equal(found.detach(), expected.detach())
    if device == "cuda":
        return  # gradients repeat under deterministic_gradients only
    for name, parameter in model.named_parameters():
        assert_bitwise_equal(parameter.grad, gradients[name], name)


def test_fast_fp32_changes_no_bit(device: str, make_bridged: Callable) -> None:
    model = make_bridged("llama", torch.float32, device)
    expected = scored(model).detach()
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert_bitwise_equal(scored(model).detach(), expected, precision)
            fresh = make_bridged("llama", torch.float32, device)
            assert_bitwise_equal(scored(fresh).detach(), expected, f"{precision}, fresh")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_compiled_model_is_found_by_its_state(make_bridged: Callable) -> None:
    model = make_bridged("llama")
    assert bridge_state(torch.compile(model)) is bridge_state(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_masters_cast_after_bridging_are_refused(
    dtype: torch.dtype, make_bridged: Callable
) -> None:
    model = make_bridged("llama", torch.float32)
    scored(model)
    model.to(dtype)
    with pytest.raises(
        InvalidInputError, match=rf"q_proj must be float32 or bfloat16, got {dtype}"
    ):
        scored(model)


def test_masters_cast_to_bf16_after_bridging_keep_their_bits(make_bridged: Callable) -> None:
    model = make_bridged("llama", torch.float32)
    expected = scored(model).detach()
    assert_bitwise_equal(scored(model.to(torch.bfloat16)).detach(), expected)


def test_bridging_a_model_again_after_a_cast_is_checked_too(make_bridged: Callable) -> None:
    model = bridge_model(make_bridged("llama")).half()
    with pytest.raises(InvalidInputError, match="Cast the model back"):
        scored(model)
