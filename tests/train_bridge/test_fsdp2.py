"""FSDP2 on the CPU (gloo): sharding moves no bit of the forward and no name."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsdp2_rank
import pytest
import torch
import torch.distributed as dist
from child_process import environment
from fsdp2_rank import IDS, TEMPERATURE, shard, two_steps

from consistent_kernels.errors import ConfigurationError, InvalidInputError, StaleWeightsError
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, token_logprobs, weight_version
from train_bridge.modules import Scoring
from train_bridge.weights import weight_receipt


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16 parameters"])
@pytest.mark.usefixtures("one_process")
def test_sharded_model_equals_plain(family: str, mixed: bool, make_bridged: Callable) -> None:
    plain = make_bridged(family, torch.float32).train()
    sharded = shard(copy.deepcopy(plain), mixed=mixed).train()
    assert list(sharded.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in sharded.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    expected = token_logprobs(plain, IDS, temperature=TEMPERATURE).log_probs
    seen = two_steps(sharded, IDS, TEMPERATURE)
    assert_bitwise_equal(seen[0], expected.detach())
    assert not sharded._bridge.prepared  # nothing gathered is kept
    assert weight_version(sharded).value == 2
    assert not torch.equal(seen[0], seen[1])
    if not mixed:  # with bf16 parameters a gradient is rounded on its way to the fp32 master
        for ours, expected in zip(seen, two_steps(plain, IDS, TEMPERATURE), strict=True):
            assert_bitwise_equal(ours, expected)
    full = {name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()}
    fresh = make_bridged(family, torch.float32)
    fresh.load_state_dict(full)
    with torch.no_grad():
        again = token_logprobs(fresh, IDS, temperature=TEMPERATURE)
    assert_bitwise_equal(again.log_probs, seen[2], "a plain model with the sharded masters")
    assert weight_receipt(sharded).digest == weight_receipt(fresh).digest


@pytest.mark.usefixtures("one_process")
def test_sharded_model_recomputes_and_detects_stale_weights(make_bridged: Callable) -> None:
    plain = make_bridged("qwen3", torch.float32).train()
    expected = token_logprobs(plain, IDS).log_probs.detach()
    gradients: list[dict[str, torch.Tensor]] = []
    for recompute in (False, True):
        model = copy.deepcopy(plain)
        if recompute:
            model.gradient_checkpointing_enable()
        shard(model, mixed=True).train()
        scores = token_logprobs(model, IDS)
        assert_bitwise_equal(scores.log_probs.detach(), expected)
        scores.log_probs.sum().backward()
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_bitwise_equal(gradients[1][name], gradient, name)
    late = token_logprobs(model, IDS).log_probs.sum()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    with pytest.raises(StaleWeightsError, match="weight version 0, now it is 1"):
        late.backward()


@pytest.mark.usefixtures("one_process")
def test_sharded_model_forgets_what_scoring_gathered(make_bridged: Callable) -> None:
    # The norm, and a tied embedding, belong to the root, which FSDP2 leaves gathered after a
    # forward without backward.
    after = []
    for score_before_step in (False, True):
        model = shard(make_bridged("llama", torch.float32), mixed=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        token_logprobs(model, IDS).log_probs.sum().backward()
        with torch.no_grad():
            if score_before_step:
                token_logprobs(model, IDS)
            optimizer.step()
            after.append(token_logprobs(model, IDS).log_probs)
    assert_bitwise_equal(after[1], after[0])


@pytest.mark.usefixtures("one_process")
def test_sharded_model_refuses_a_rounded_temperature(make_bridged: Callable) -> None:
    model = shard(make_bridged("llama", torch.float32), mixed=True)
    with torch.no_grad():
        assert_bitwise_equal(
            model(IDS, temperature=0.7).log_probs[:, :-1].contiguous(),
            token_logprobs(model, IDS, temperature=0.7).log_probs[:, 1:].contiguous(),
        )
        with pytest.raises(InvalidInputError, match="has rounded it; pass a number"):
            model(IDS, temperature=TEMPERATURE)


@pytest.mark.usefixtures("one_process")
def test_sharded_model_control_tensors_are_cast_at_the_border(make_bridged: Callable) -> None:
    # Why temperatures travel inside `Scoring`: FSDP2 casts every float tensor that it can see.
    model = shard(make_bridged("llama", torch.float32), mixed=True)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    scoring = Scoring(None, IDS[0, 1:], TEMPERATURE)
    with pytest.raises(ConfigurationError, match="bare: the bridged forward does not know it"):
        model(IDS, scoring=scoring, bare=TEMPERATURE)
    assert seen[0]["scoring"].temperature is TEMPERATURE
    assert seen[0]["bare"].dtype == torch.bfloat16


@pytest.mark.usefixtures("one_process")
def test_bridge_rejects_a_sharded_model(make_stock: Callable) -> None:
    with pytest.raises(ConfigurationError, match="call bridge_model before fully_shard"):
        bridge_model(shard(make_stock("llama", torch.float32), mixed=True))


def test_two_ranks_equal_one_process(make_bridged: Callable, tmp_path: Path) -> None:
    plain = make_bridged("qwen3", torch.float32)
    with torch.no_grad():
        expected = token_logprobs(plain, IDS, temperature=TEMPERATURE).log_probs
    ranks = [
        subprocess.Popen(
            [sys.executable, fsdp2_rank.__file__, str(rank), str(tmp_path)],
            env=environment(OMP_NUM_THREADS="1"),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=300)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for rank, result in enumerate(found):
        assert_bitwise_equal(result["log_probs"], expected[rank : rank + 1], f"rank {rank}")
    assert found[0]["digest"] == found[1]["digest"], "the ranks hold different weights"
