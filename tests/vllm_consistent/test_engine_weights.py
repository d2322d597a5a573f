"""Weights in place: receipts, staleness, NaN, tied and fused tensors (R9)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, tiny_model

from consistent_kernels.errors import (
    ConfigurationError,
    ConsistencyError,
    InvalidInputError,
    StaleWeightsError,
)
from consistent_kernels.protocol.weights import WeightReceipt, check_receipt, state_digest
from consistent_kernels.testing import assert_bitwise_equal

pytestmark = pytest.mark.engine

PROMPTS = [[5, 9, 200, 31, 7], list(range(40, 100))]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(family: str, engines: Callable[..., Any], checkpoints: Callable[[str], Path]) -> Any:
    """A shared engine, with the checkpoint's weights before and after each test."""
    engine = engines(family)
    weights = load_file(checkpoints(family) / "model.safetensors")
    engine.update_weights(weights, version=0)
    yield engine
    engine.update_weights(weights, version=0)


@pytest.fixture
def llama(engines: Callable[..., Any], checkpoints: Callable[[str], Path]) -> Any:
    engine = engines("llama")
    weights = load_file(checkpoints("llama") / "model.safetensors")
    engine.update_weights(weights, version=0)
    yield engine
    engine.update_weights(weights, version=0)


def sample(engine: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0, seed=1, detokenize=False)
    return engine.generate_with_logprobs(PROMPTS, params)


def named(family: str, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = tiny_model(family, seed=seed, dtype=torch.float32)
    return {name: p.detach().to(dtype) for name, p in model.named_parameters()}


def assert_same(got: list[Any], expected: list[Any]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert_bitwise_equal(ours.logprobs, theirs.logprobs)


def is_same(got: list[Any], expected: list[Any]) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(torch.equal(a.logprobs, b.logprobs) for a, b in pairs)


def test_update_equals_a_fresh_engine(
    engine: Any, family: str, start_engine: Callable[..., Any], tmp_path: Path
) -> None:
    before = sample(engine)
    new = named(family, seed=1)
    receipt = WeightReceipt.from_dict(engine.update_weights(new, version=7))
    after = sample(engine)
    # Control: the new weights do something.
    assert not is_same(after, before)
    assert receipt.version == 7
    expected = WeightReceipt(7, state_digest(new.items()), engine.contract.digest)
    check_receipt(receipt, expected)
    tiny_model(family, seed=1).save_pretrained(tmp_path)
    fresh = start_engine(family, model_folder=tmp_path)
    assert_same(after, sample(fresh))
    check_receipt(WeightReceipt.from_dict(engine.weight_receipt()), expected)


def test_update_from_equal_weights_changes_no_bit(engine: Any, family: str) -> None:
    before = sample(engine)
    first = engine.weight_receipt()
    again = engine.update_weights(named(family, seed=0, dtype=torch.bfloat16), version=0)
    assert again == first
    assert_same(sample(engine), before)


def test_two_updates_then_a_reload(engine: Any, family: str, checkpoints: Any) -> None:
    start = sample(engine)
    engine.update_weights(named(family, seed=1))
    assert engine.weight_receipt()["version"] == 1
    engine.update_weights(named(family, seed=2))
    assert not is_same(sample(engine), start)
    # vLLM's own reload from the checkpoint, layer by layer.
    engine.llm.collective_rpc("reload_weights")
    engine.reset_prefix_cache()
    assert engine.weight_receipt()["version"] == 3
    assert_same(sample(engine), start)


def test_update_in_buckets_and_from_a_file(llama: Any, tmp_path: Path) -> None:
    new = named("llama", seed=3)
    rpc = llama.llm.collective_rpc
    items = list(new.items())
    rpc("update_weights_in_place", kwargs={"weights": items[:10], "finish": False})
    with pytest.raises(StaleWeightsError, match="a weight update is under way"):
        llama.weight_receipt()
    rpc("update_weights_in_place", kwargs={"weights": items[10:], "version": 4})
    llama.reset_prefix_cache()
    bucketed = sample(llama)
    total = llama.weight_receipt()["total"]
    save_file(new, tmp_path / "model.safetensors")
    llama.update_weights(named("llama", seed=4))
    receipt = llama.update_weights(path=str(tmp_path), version=5)
    assert receipt["total"] == total
    assert_same(sample(llama), bucketed)


def test_rejects_missing_unknown_and_misshapen_tensors(llama: Any, tmp_path: Path) -> None:
    good = sample(llama)
    new = named("llama", seed=1)
    with pytest.raises(InvalidInputError, match=r"unknown tensor\(s\) model\.layers\.0\.qkv"):
        llama.update_weights({**new, "model.layers.0.qkv": torch.zeros(1)})
    with pytest.raises(
        InvalidInputError, match=r"model\.norm\.weight must be \(192,\), got \(3,\)"
    ):
        llama.update_weights({**new, "model.norm.weight": torch.zeros(3)})
    with pytest.raises(InvalidInputError, match=r"must be of a float dtype, got torch\.int64"):
        llama.update_weights({**new, "model.norm.weight": torch.ones(192, dtype=torch.int64)})
    with pytest.raises(InvalidInputError, match="version must be an integer, got '7'"):
        llama.update_weights(new, version="7")
    with pytest.raises(InvalidInputError, match="pass its path"):
        llama.update_weights({**new, "model.norm.weight": [1.0] * 192})
    with pytest.raises(ConfigurationError, match="pass either weights or path"):
        llama.update_weights()
    with pytest.raises(ConfigurationError, match=r"no \.safetensors file at /nowhere"):
        llama.update_weights(path="/nowhere")
    damaged = tmp_path / "half.safetensors"
    damaged.write_bytes(b"garbage")
    with pytest.raises(ConfigurationError, match=r"half\.safetensors cannot be read .* write it"):
        llama.update_weights(path=str(damaged))
    # Nothing was loaded, so the old weights still serve.
    assert_same(sample(llama), good)
    del new["model.norm.weight"]
    with pytest.raises(StaleWeightsError, match=r"lacks 1 tensor\(s\): model\.norm\.weight"):
        llama.update_weights(new)


# 3.4e38 is finite in fp32 and rounds to infinity in bf16.
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_names_nan_weights_before_they_are_served(llama: Any, value: float) -> None:
    good = sample(llama)
    new = {name: tensor.float() for name, tensor in named("llama", seed=1).items()}
    new["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    with pytest.raises(ConsistencyError, match=r"NaN or infinity in 1 tensor.*1\.mlp\.up_proj"):
        llama.update_weights(new)
    assert_same(sample(llama), good)


def test_rejects_a_checkpoint_with_nan(start_engine: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0, 0] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConsistencyError, match=r"layers\.2\.self_attn\.k_proj\.weight"):
        start_engine("llama", model_folder=tmp_path)


def test_rejects_a_checkpoint_that_lacks_a_weight(
    start_engine: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StaleWeightsError, match=r"lacks 1 of .*layers\.0\.mlp\.down_proj\.weight"):
        start_engine("llama", model_folder=tmp_path)


def test_a_failed_start_leaves_the_default_dtype(
    start_engine: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not initialized from checkpoint"):
        start_engine("llama", model_folder=tmp_path)
    assert torch.get_default_dtype() == torch.float32


def test_tied_head_must_equal_the_embedding(llama: Any) -> None:
    new = named("llama", seed=1)
    head = {"lm_head.weight": new["model.embed_tokens.weight"].clone()}
    llama.update_weights({**new, **head})
    head["lm_head.weight"][0, 0] += 1
    with pytest.raises(InvalidInputError, match=r"lm_head\.weight must equal model\.embed_tokens"):
        llama.update_weights({**new, **head})


def test_refuses_a_rollout_on_weights_loaded_past_the_update(llama: Any) -> None:
    weights = list(named("llama", seed=1).items())
    llama.llm.collective_rpc(load_past_update, args=(weights,))
    with pytest.raises(StaleWeightsError, match="past update_weights_in_place"):
        llama.weight_receipt()
    with pytest.raises(StaleWeightsError, match="rollout refused"):
        sample(llama)
    llama.llm.collective_rpc("serve_loaded_weights", kwargs={"version": 9})
    llama.reset_prefix_cache()
    assert llama.weight_receipt()["version"] == 9


def load_past_update(worker: Any, weights: Any) -> None:
    worker.model_runner.get_model().load_weights(weights)


def test_detects_a_parameter_written_behind_our_back(llama: Any) -> None:
    llama.llm.collective_rpc(flip_one_bit)
    with pytest.raises(StaleWeightsError, match=r"does not follow|lm_head"):
        llama.weight_receipt()


def flip_one_bit(worker: Any) -> None:
    weight = worker.model_runner.get_model().model.embed_tokens.weight
    weight.data.view(torch.int16)[3, 4] ^= 1


def test_refuses_pages_of_older_weights(llama: Any, checkpoints: Callable[[str], Path]) -> None:
    sample(llama)
    kwargs = {"weights": named("llama", seed=1)}
    llama.llm.collective_rpc("update_weights_in_place", kwargs=kwargs)
    # The prefix cache was not reset: pages of the old weights would be hit.
    assert not rollout_refused(llama, [[7, 8, 9]])
    assert rollout_refused(llama, PROMPTS)


def rollout_refused(engine: Any, prompts: list[list[int]]) -> bool:
    """Step the worker on what the scheduler wants, without breaking the shared engine."""
    from vllm_consistent.weights.served import ServedWeights

    seen: list[str] = []
    stock = ServedWeights.check_step

    def checking(self: ServedWeights, step: Any, block_sizes: list[int]) -> None:
        try:
            stock(self, step, block_sizes)
        except StaleWeightsError as error:
            seen.append(str(error))

    ServedWeights.check_step = checking
    try:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=2, logprobs=0, detokenize=False)
        engine.generate_with_logprobs(prompts, params)
    finally:
        ServedWeights.check_step = stock
    return any("reset_prefix_cache" in text for text in seen)
