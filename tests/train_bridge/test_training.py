"""Bits across updates: every step's first training forward is what was scored before it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
import torch

from consistent_kernels.errors import StaleWeightsError
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, token_logprobs, weight_version

LEARNING_RATE = 1e-2  # coarse enough to move a bf16 norm weight near 1 in three steps


def advantages(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch[0].shape, generator=generator).to(batch[0].device)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    steps: int,
) -> Iterator[torch.Tensor]:
    """Policy-gradient steps; yields the log-probs scored before each, checked against training."""
    for _ in range(steps):
        with torch.no_grad():
            old = token_logprobs(model, *batch, temperature=0.9)
        new = token_logprobs(model, *batch, temperature=0.9)
        assert_bitwise_equal(new.log_probs.detach(), old.log_probs, "first forward of the update")
        ratio = (new.log_probs - old.log_probs).exp()
        assert bool((ratio == 1).all())
        loss = -(ratio * advantages(batch))[new.mask].mean() - 0.001 * new.entropy[new.mask].mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == parameter.dtype
            assert bool(torch.isfinite(parameter.grad).all()), name
            assert bool(parameter.grad.any()), name
        optimizer.step()
        optimizer.zero_grad()
        yield old.log_probs


def masters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_model_stays_equal_over_updates(
    family: str, device: str, dtype: torch.dtype, make_bridged: Callable, make_sequences: Callable
) -> None:
    model = make_bridged(family, dtype, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batch = make_sequences(family, device).padded("left")
    before = masters_of(model)
    first, second, third = train(model, optimizer, batch, 3)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert weight_version(model).value == 3
    changed = [
        name for name, old in before.items() if not torch.equal(old, masters_of(model)[name])
    ]
    assert changed == list(before)
    # A model built from the updated masters scores alike: nothing stale was kept.
    fresh = make_bridged(family, dtype, device)
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_bitwise_equal(
            token_logprobs(fresh, *batch).log_probs, token_logprobs(model, *batch).log_probs
        )


def test_model_resumes_from_a_checkpoint(
    device: str, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences("llama", device).padded("right")
    model = make_bridged("llama", torch.float32, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    run = train(model, optimizer, batch, 3)
    next(run), next(run)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed = make_bridged("llama", torch.float32, device)
    with torch.no_grad():  # prepared for other weights, as after a warm-up
        token_logprobs(resumed, *batch)
    again = torch.optim.AdamW(resumed.parameters(), lr=LEARNING_RATE)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert_bitwise_equal(next(train(resumed, again, batch, 1)), next(run))
    for name, parameter in resumed.named_parameters():
        assert_bitwise_equal(parameter, model.get_parameter(name), name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_model_gradients_do_not_depend_on_recompute(
    family: str, device: str, reentrant: bool, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences(family, device).padded("left")
    gradients = []
    for recompute in (False, True):
        model = make_bridged(family, torch.float32, device).train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        (token_logprobs(model, *batch).log_probs * advantages(batch)).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert_bitwise_equal(gradients[1][name], expected, name)


def test_model_gradients_do_not_depend_on_padding_or_autocast(
    device: str, make_bridged: Callable, make_sequences: Callable
) -> None:
    sequences = make_sequences("qwen3", device)
    gradients = []
    for side, autocast in (("left", False), ("right", False), ("right", True)):
        model = make_bridged("qwen3", torch.float32, device)
        batch = sequences.padded(side)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            scores = token_logprobs(model, *batch)
            scores.log_probs[scores.mask].square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for other in gradients[1:]:
        for name, expected in gradients[0].items():
            assert_bitwise_equal(other[name], expected, name)


def test_tied_master_receives_both_gradients(
    device: str, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences("llama", device).padded("left")

    def gradient(part: str) -> torch.Tensor:
        model = make_bridged("llama", torch.float32, device)
        table = model.model.embed_tokens.weight
        assert table is model.lm_head.weight
        if part != "both":
            twin = torch.nn.Parameter(table.detach().clone())
            owner = model.lm_head if part == "embedding" else model.model.embed_tokens
            owner.weight = twin
        token_logprobs(model, *batch).log_probs.sum().backward()
        return table.grad

    both = gradient("both")
    # autograd adds the two in fp32: one rounding, 2^-24 of the sum.
    expected = gradient("embedding") + gradient("head")
    assert bool(((both - expected).abs() <= 2.0**-23 * expected.abs()).all())
    assert bool(gradient("embedding").any())
    assert bool(gradient("head").any())


def test_padding_id_receives_no_embedding_gradient(make_bridged: Callable) -> None:
    model = make_bridged("qwen3", torch.float32)
    padding = model.config.pad_token_id
    ids = torch.tensor([[5, padding, 9, 7]])
    token_logprobs(model, ids).log_probs.sum().backward()
    grad = model.model.embed_tokens.weight.grad
    assert not grad[padding].any()
    assert bool(grad[9].any())


def test_frozen_parameters_receive_nothing(
    make_bridged: Callable, make_sequences: Callable
) -> None:
    model = make_bridged("qwen2", torch.float32).train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = model.model.layers[1].self_attn.v_proj.bias.requires_grad_(True)
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        trained.grad = None
        token_logprobs(model, *make_sequences("qwen2").padded("left")).log_probs.sum().backward()
        assert bool(trained.grad.any())
        assert all(p.grad is None for p in model.parameters() if p is not trained)


def test_backward_rejects_weights_of_a_later_step(
    device: str, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences("llama", device).padded("left")
    model = make_bridged("llama", torch.float32, device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for recompute in (None, False, True):
        if recompute is not None:
            model.gradient_checkpointing_enable({"use_reentrant": recompute})
        token_logprobs(model, *batch).log_probs.sum().backward()
        late = token_logprobs(model, *batch).log_probs.sum()
        optimizer.step()
        with pytest.raises(
            StaleWeightsError, match=r"backward of lm_head.*weight version \d+, now"
        ):
            late.backward()
        hidden = model.model(batch[0], batch[1]).last_hidden_state.float().sum()
        optimizer.step()
        with pytest.raises(StaleWeightsError, match="backward of model:"):
            hidden.backward()


def test_backward_rejects_changed_masters(make_bridged: Callable, make_sequences: Callable) -> None:
    batch = make_sequences("llama").padded("left")
    model = make_bridged("llama", torch.float32)
    weight = model.model.layers[1].mlp.up_proj.weight
    loss = token_logprobs(model, *batch).log_probs.sum()
    with torch.no_grad():
        weight.mul_(1.5)
    with pytest.raises(
        StaleWeightsError, match=r"model\.layers\.1\.mlp\.up_proj.*changed in place"
    ):
        loss.backward()
    loss = token_logprobs(model, *batch).log_probs.sum()
    weight.data.mul_(1.5)  # no counter of PyTorch's sees this one
    weight_version(model).bump()
    with pytest.raises(StaleWeightsError, match="weight version 0, now it is 1"):
        loss.backward()


def test_optimizer_of_another_model_does_not_bump(make_bridged: Callable) -> None:
    model, other = make_bridged("llama"), make_bridged("llama")
    parameter = other.model.norm.weight
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()
    assert weight_version(other).value == 1
    assert weight_version(model).value == 0


def test_training_control_autograds_own_check_misses_the_masters(make_stock: Callable) -> None:
    # What the version counter is for: PyTorch lets a backward run on changed weights.
    model = bridge_model(make_stock("llama", torch.float32))
    loss = token_logprobs(model, torch.arange(5, 25)[None]).log_probs.sum()
    master = model.model.layers[0].mlp.up_proj.weight
    master.data.mul_(2)
    loss.backward()
    assert bool((master.grad != 0).any())
