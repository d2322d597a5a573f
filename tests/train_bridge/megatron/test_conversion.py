"""Weights between Hugging Face's names and megatron-core's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core (extra: megatron)")

from tiny_gpt import gpt_model, named

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.model_facts import ModelFacts, model_facts
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge.megatron import from_hf_state, hf_named
from train_bridge.megatron.conversion import qkv_rows

pytestmark = pytest.mark.megatron


def facts_of(model: torch.nn.Module) -> ModelFacts:
    return model_facts(named(model).config, "bfloat16")


def test_round_trip(family: str, make_stock: Callable) -> None:
    stock = make_stock(family)
    facts = facts_of(stock)
    state = dict(stock.named_parameters())
    back = dict(hf_named(from_hf_state(stock.state_dict(), facts), facts))
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert_bitwise_equal(back[name], tensor.detach(), name)


def test_names_and_shapes_are_those_of_a_gpt_model(family: str, make_stock: Callable) -> None:
    stock = named(make_stock(family))
    model = gpt_model(stock.config, vocab_rows=1408)
    made = from_hf_state(stock.state_dict(), facts_of(stock), vocab_rows=1408)
    expected = {name: p.shape for name, p in model.named_parameters()}
    assert {name: tensor.shape for name, tensor in made.items()} == expected


def test_qkv_is_interleaved_by_group() -> None:
    """Two key heads, four query heads, head dim 2: q0 q1 k0 v0 | q2 q3 k1 v1."""

    class Two:
        num_heads, num_kv_heads, head_dim = 4, 2, 2

    heads = ("q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1")
    stacked = [head + row for head in heads for row in "ab"]
    interleaved = [""] * 16
    for name, row in zip(stacked, qkv_rows(Two).tolist(), strict=True):
        interleaved[row] = name
    order = [interleaved[i][:2] for i in range(0, 16, 2)]
    assert order == ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]


def test_qkv_rows_agree_with_megatron_core(make_stock: Callable) -> None:
    """megatron-core's own split of the fused projection gives q, k and v of these rows."""
    from megatron.core.transformer.attention import SelfAttention

    stock = named(make_stock("qwen2"))
    facts = facts_of(stock)
    attention = gpt_model(stock.config).decoder.layers[0].self_attention
    width = qkv_rows(facts).numel()
    numbers = torch.arange(width, dtype=torch.float32)[None, None]

    class Numbers(torch.nn.Module):
        def forward(self, _: torch.Tensor) -> tuple[torch.Tensor, None]:
            return numbers, None

    attention.linear_qkv = Numbers()
    split = SelfAttention.get_query_key_value_tensors(attention, numbers)
    flat = torch.cat([part.flatten() for part in split])
    assert torch.equal(flat.long(), qkv_rows(facts))


def test_rejects_missing_and_unknown_names(make_stock: Callable) -> None:
    stock = make_stock("qwen3")
    facts, state = facts_of(stock), stock.state_dict()
    fewer = {name: t for name, t in state.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(InvalidInputError, match=r"layers\.1\.mlp\.up_proj"):
        from_hf_state(fewer, facts)
    with pytest.raises(InvalidInputError, match="rotary"):
        from_hf_state(state | {"model.rotary": torch.zeros(1)}, facts)
    made = from_hf_state(state, facts)
    with pytest.raises(InvalidInputError, match="adapter"):
        list(hf_named(made | {"adapter.weight": torch.zeros(1)}, facts))
    del made["decoder.final_layernorm.weight"]
    with pytest.raises(InvalidInputError, match="final_layernorm"):
        list(hf_named(made, facts))
