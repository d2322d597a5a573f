"""bridge_model changes the forward and nothing else."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from consistent_kernels.errors import (
    ConfigurationError,
    ContractMismatchError,
    InvalidInputError,
    UnsupportedError,
)
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, token_logprobs, unbridge_model
from train_bridge.hf import bridge_state, is_bridged


def names_and_storage(model: nn.Module) -> dict[str, int]:
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_bridge_keeps_parameters_names_and_class_names(family: str, make_stock: Callable) -> None:
    model = make_stock(family)
    before = names_and_storage(model)
    keys, objects = list(model.state_dict()), dict(model.named_parameters())
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert bridge_model(model) is model
    assert names_and_storage(model) == before
    assert list(model.state_dict()) == keys
    assert all(objects[name] is parameter for name, parameter in model.named_parameters())
    assert {name: type(module).__name__ for name, module in model.named_modules()} == classes
    for name, module in model.named_modules():
        assert isinstance(module, kinds[name])
    # What wrap policies look for.
    assert type(model.model.layers[0]).__name__ in model._no_split_modules
    swapped = [m for m in model.modules() if type(m).__module__ == "train_bridge.classes"]
    assert len(swapped) > 10 * len(model.model.layers)


def test_bridge_is_idempotent_and_undone(family: str, make_stock: Callable) -> None:
    model = make_stock(family)
    kinds = {name: type(module) for name, module in model.named_modules()}
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        stock = model(ids).logits
        bridge_model(model)
        state = bridge_state(model)
        ours = model(ids).logits
        assert bridge_model(model) is model
        assert bridge_state(model) is state
        assert_bitwise_equal(model(ids).logits, ours)
        unbridge_model(model)
        assert not is_bridged(model)
        assert {name: type(module) for name, module in model.named_modules()} == kinds
        assert not any("_bridge" in vars(module) for module in model.modules())
        assert_bitwise_equal(model(ids).logits, stock)
        assert unbridge_model(model) is model
        assert_bitwise_equal(bridge_model(model)(ids).logits, ours)


def test_bridge_survives_save_pretrained(
    family: str, make_bridged: Callable, tmp_path: Path
) -> None:
    model = make_bridged(family)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(loaded).__module__.startswith("transformers.")
    assert loaded.config.architectures == [type(loaded).__name__]
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert_bitwise_equal(theirs, ours, name)
    ids = torch.arange(5, 25)[None]
    assert_bitwise_equal(
        token_logprobs(bridge_model(loaded), ids).log_probs, token_logprobs(model, ids).log_probs
    )


def test_bridge_survives_copy_and_pickle(make_bridged: Callable) -> None:
    model = make_bridged("qwen2")
    ids = torch.arange(5, 25)[None]
    expected = token_logprobs(model, ids).log_probs
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert bridge_state(twin) is not bridge_state(model)
        assert bridge_state(twin) is twin.model.layers[0].mlp.up_proj._bridge
        assert_bitwise_equal(token_logprobs(twin, ids).log_probs, expected)
        with torch.no_grad():
            twin.model.layers[0].mlp.up_proj.weight.mul_(2)
        assert not torch.equal(token_logprobs(twin, ids).log_probs, expected)
    assert_bitwise_equal(token_logprobs(model, ids).log_probs, expected)


def test_bridge_accepts_its_contract_and_rejects_another(
    make_stock: Callable, make_bridged: Callable
) -> None:
    contract = bridge_state(make_bridged("llama")).contract
    model = make_stock("llama")
    bridge_model(model, contract)
    assert bridge_state(model).contract.digest == contract.digest
    other = make_stock("qwen3")
    with pytest.raises(ContractMismatchError, match="qk_norm"):
        bridge_model(other, contract)
    assert not is_bridged(other)
    assert all(not is_bridged(module) for module in other.modules())
    with pytest.raises(ContractMismatchError, match="this trainer"):
        bridge_model(model, bridge_state(make_bridged("qwen3")).contract)


def test_bridge_rejects_unknown_architecture() -> None:
    config = MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"MistralForCausalLM.*unknown; supported: Llama"):
        bridge_model(MistralForCausalLM(config))
    with pytest.raises(ConfigurationError, match="Linear"):
        bridge_model(nn.Linear(2, 2))


def test_bridge_lists_all_violations_at_once(make_stock: Callable) -> None:
    model = make_stock("qwen3")
    model.config.attention_dropout = 0.1
    model.config.attention_bias = True
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model.config.hidden_act = "gelu"
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    model.config.use_sliding_window = True
    model.config.sliding_window = 32
    model.config.tie_word_embeddings = True
    model.model.layers[1].mlp.up_proj = nn.Identity()
    model.model.norm.to(torch.float16)
    with pytest.raises(ConfigurationError) as error:
        bridge_model(model)
    text = "\n".join(error.value.violations)
    for part in (
        "attention_dropout=0.1", "attention_bias=True", "dynamic", "gelu", "layer_types mixes",
        "tie_word_embeddings", "model.layers.1.mlp.up_proj (Identity)", "torch.float16",
    ):  # fmt: skip
        assert part in text
    assert not any(is_bridged(module) for module in model.modules())


def test_bridge_rejects_replaced_forwards(make_stock: Callable) -> None:
    model = make_stock("llama")
    layer = model.model.layers[0].mlp
    layer.forward = lambda x: x
    with pytest.raises(ConfigurationError, match=r"model\.layers\.0\.mlp"):
        bridge_model(model)


def test_forward_rejects_what_the_trainer_has_not(make_bridged: Callable) -> None:
    model = make_bridged("llama")
    ids = torch.arange(5, 25)[None]
    with pytest.raises(ConfigurationError) as error:
        model(ids, use_cache=True, output_attentions=True, head_mask=torch.ones(1))
    assert len(error.value.violations) == 3
    with pytest.raises(ConfigurationError, match="generate with the engine"):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(InvalidInputError, match="Embeddings are not accepted"):
        model()
    with pytest.raises(ConfigurationError, match="pass input_ids"):
        model(inputs_embeds=torch.zeros(1, 2, 192))


def test_forward_serves_hugging_face_loss_and_tuples(make_bridged: Callable) -> None:
    model = make_bridged("llama")
    ids = torch.randint(3, 1000, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :4] = -100
    output = model(ids, labels=labels)
    scores = token_logprobs(model, ids, response_mask=(labels >= 0) & (torch.arange(9) > 0))
    expected = -scores.log_probs[scores.mask].mean()
    # Two ways to add 13 fp32 numbers: (13 - 1) * 2^-24 of the sum of magnitudes each.
    assert abs(output.loss - expected) <= 2 * 12 * 2.0**-24 * expected.abs()
    assert_bitwise_equal(model(ids, return_dict=False)[0], output.logits)


def test_device_type_must_match_the_forward(make_bridged: Callable) -> None:
    model = make_bridged("llama")
    with pytest.raises(ConfigurationError, match="bridged for cpu, not for cuda"):
        bridge_model(model, device_type="cuda")
    with pytest.raises(InvalidInputError, match="on cpu, for which the contract was resolved"):
        model(torch.zeros(1, 2, dtype=torch.long, device="meta"))


def test_meta_parameters_need_a_device_type(make_stock: Callable) -> None:
    model = make_stock("llama").to("meta")
    model.tie_weights()
    with pytest.raises(ConfigurationError, match="give device_type"):
        bridge_model(model)
    assert is_bridged(bridge_model(model, device_type="cpu"))


def test_bridge_model_rejects_an_unknown_program(make_stock: Callable) -> None:
    with pytest.raises(UnsupportedError, match="program 'cutlass'"):
        bridge_model(make_stock("llama"), program="cutlass")
