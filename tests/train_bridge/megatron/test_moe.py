"""Experts under megatron-core: what the families of test_parity.py do not show of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core (extra: megatron)")

from tiny_gpt import all_moe_config, gpt_model, named
from transformers import Qwen3MoeForCausalLM

from consistent_kernels.errors import InvalidInputError, StaleWeightsError
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, consistency_report, token_logprobs, weight_version
from train_bridge.megatron import bridge_gpt_model, from_hf_state
from train_bridge.modules import Bridged, Gemm
from train_bridge.weights import check_prepared

pytestmark = pytest.mark.megatron


def scores(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, *batch, temperature=0.7).log_probs


def one_by_one(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of a checkpoint: gate, up and down of each expert apart."""
    found = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for index, rows in enumerate(tensor):
                gate, up = rows.chunk(2)
                found[f"{prefix}{index}.gate_proj.weight"] = gate
                found[f"{prefix}{index}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            found |= {f"{prefix}{i}.down_proj.weight": row for i, row in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def test_experts_one_by_one_equal_stacked(make_gpt: Callable, make_stock: Callable) -> None:
    state, facts = make_stock("qwen3_moe").state_dict(), make_gpt("qwen3_moe").state.facts
    stacked, separate = (from_hf_state(s, facts) for s in (state, one_by_one(state)))
    assert stacked.keys() == separate.keys()
    for name, tensor in stacked.items():
        assert_bitwise_equal(tensor, separate[name], name)
    fewer = one_by_one(state)
    del fewer["model.layers.2.mlp.experts.7.up_proj.weight"]
    with pytest.raises(InvalidInputError, match=r"experts\.7\.up_proj"):
        from_hf_state(fewer, facts)


@pytest.mark.parametrize("renormalize", [True, False])
def test_every_layer_with_experts_and_either_weighting(renormalize: bool) -> None:
    """Qwen3-30B-A3B's shape in small: no dense layer, so that one layer spec serves."""
    config = all_moe_config(renormalize=renormalize)
    torch.manual_seed(0)
    stock = named(Qwen3MoeForCausalLM(config).bfloat16())
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(0.08 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    model = bridge_gpt_model(gpt_model(config, moe_layer_freq=1), config)
    model.load_state_dict(from_hf_state(stock.state_dict(), model.state.facts))
    ids = torch.randint(3, 1000, (2, 40))
    batch = (ids, torch.ones_like(ids))
    assert_bitwise_equal(scores(model, batch), scores(bridge_model(stock), batch))


def test_experts_control_two_swapped(
    make_gpt: Callable, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences("qwen3_moe").padded("left")
    model = make_gpt("qwen3_moe")
    with torch.no_grad():
        linear = model.decoder.layers[2].mlp.experts.linear_fc2
        first = linear.weight0.clone()
        linear.weight0.copy_(linear.weight1)
        linear.weight1.copy_(first)
    with pytest.raises(AssertionError):
        assert_bitwise_equal(scores(model, batch), scores(make_bridged("qwen3_moe"), batch))


def test_control_one_expert_changed_behind_every_counter(
    make_gpt: Callable, make_sequences: Callable
) -> None:
    model = make_gpt("qwen3_moe")
    scores(model, make_sequences("qwen3_moe").padded("right"))
    check_prepared(model)
    model.decoder.layers[0].mlp.experts.linear_fc1.weight5.data.mul_(2)
    with pytest.raises(StaleWeightsError, match=r"experts\.linear_fc1"):
        check_prepared(model)


def test_backward_of_experts_after_a_change_is_refused(
    make_gpt: Callable, make_sequences: Callable
) -> None:
    model = make_gpt("qwen3_moe")
    batch = make_sequences("qwen3_moe").padded("right")
    result = token_logprobs(model, *batch)
    with torch.no_grad():
        model.decoder.layers[2].mlp.experts.linear_fc1.weight3.mul_(2)
    with pytest.raises(StaleWeightsError, match="changed in place"):
        result.log_probs.sum().backward()
    result = token_logprobs(model, *batch)
    weight_version(model).bump()
    with pytest.raises(StaleWeightsError, match="optimizer step"):
        result.log_probs.sum().backward()


def test_recompute_of_the_layer_changes_no_gradient(
    make_gpt: Callable, make_sequences: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    # megatron-core's checkpoint saves and restores CUDA's generator state.
    for name in ("_set_cuda_rng_state", "_get_cuda_rng_state"):
        monkeypatch.setattr(f"megatron.core.tensor_parallel.random.{name}", lambda *_, **__: None)
    batch = make_sequences("qwen3_moe").padded("right")
    options = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    plain, again = make_gpt("qwen3_moe").train(), make_gpt("qwen3_moe", **options).train()
    calls = []
    again.decoder.layers[0].mlp.router.register_forward_hook(lambda *_: calls.append(1))
    for model in (plain, again):
        token_logprobs(model, *batch).log_probs.sum().backward()
    assert len(calls) == 2
    for (name, ours), theirs in zip(again.named_parameters(), plain.parameters(), strict=True):
        assert_bitwise_equal(ours.grad, theirs.grad, name)


def test_report_lists_experts(make_gpt: Callable, make_bridged: Callable) -> None:
    report = consistency_report(make_gpt("qwen3_moe"))
    assert report.digest == make_bridged("qwen3_moe")._bridge.contract.digest
    assert report.foreign_layers == ()
    assert report.layers["VllmTopKRouter"] == report.layers["VllmGroupedMLP"] == 2


def test_start_knows_every_gemm(make_gpt: Callable, make_bridged: Callable) -> None:
    """What a GPU start compiles and probes: fused columns here, the same ones apart there."""

    def gemms(model: torch.nn.Module) -> set[Gemm]:
        return {g for m in model.modules() if isinstance(m, Bridged) for g in m.gemms()}

    def stacks(model: torch.nn.Module) -> set[tuple[int, ...] | None]:
        found = (m.expert_stack() for m in model.modules() if isinstance(m, Bridged))
        return {stack for stack in found if stack is not None}

    ours, theirs = make_gpt("qwen3_moe", vocab_rows=1408), make_bridged("qwen3_moe")
    shared = {
        Gemm(192, 512),
        Gemm(192, 320),
        Gemm(16, 192, out_fp32=True),
        Gemm(1280, 192, out_fp32=True, streamed=True),
    }
    assert gemms(ours) == shared | {Gemm(1024, 192), Gemm(640, 192)}
    assert gemms(theirs) == shared | {Gemm(512, 192), Gemm(256, 192), Gemm(320, 192)}
    assert stacks(ours) == stacks(theirs) == {(16, 192, 128)}
    biased = make_gpt("qwen2")
    assert not any(gemm.columns == 512 for gemm in gemms(biased)), "q, k, v have a bias"
