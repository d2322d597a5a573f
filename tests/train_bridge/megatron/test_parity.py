"""A GPTModel of our spec has the bits of the bridged Hugging Face model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core (extra: megatron)")

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import Float16Module
from tiny_gpt import gpt_model, named
from transformers import Qwen2Config, Qwen2ForCausalLM

from consistent_kernels.errors import ConfigurationError, InvalidInputError, StaleWeightsError
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, consistency_report, token_logprobs, weight_version
from train_bridge.megatron import bridge_gpt_model, from_hf_state, hf_named
from train_bridge.weights import check_prepared, weight_receipt

pytestmark = pytest.mark.megatron

CHANGED_ROUNDINGS = 12
"""bf16 roundings of gradients in one layer that fusing moves. Separate projections round the
gradient of their common input once each and once a sum: 5 for q, k, v, 3 for gate and up; the fused
ones round it once each: 2. The residual's sum takes the other value in: 2."""
RMS_ERROR = 2.0**-8 / 3**0.5 * (3 / (8 * math.log(2))) ** 0.5
"""Relative error of one rounding to bf16, as in tests/train_bridge/test_gradients.py."""


def bound(layers: int) -> float:
    """Relative L2 distance of two gradients that passed through every layer.

    2.5 as in tests/train_bridge/test_gradients.py: what norm and softmax amplify.
    """
    return 2.5 * (CHANGED_ROUNDINGS * layers) ** 0.5 * RMS_ERROR


def scores(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model, *batch, temperature=0.7).log_probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gpt_model_train_equals_hf(
    dtype: torch.dtype,
    family: str,
    device: str,
    make_gpt: Callable,
    make_bridged: Callable,
    make_sequences: Callable,
) -> None:
    batch = make_sequences(family, device).padded("left")
    ours = token_logprobs(make_gpt(family, dtype, device), *batch, temperature=0.7)
    theirs = token_logprobs(make_bridged(family, dtype, device), *batch, temperature=0.7)
    assert theirs.mask.sum() > 100
    assert_bitwise_equal(ours.log_probs, theirs.log_probs)
    assert_bitwise_equal(ours.entropy, theirs.entropy)


def test_gpt_model_control_one_bit_of_one_weight(
    make_gpt: Callable, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences("qwen3").padded("left")
    model = make_gpt("qwen3")
    with torch.no_grad():
        weight = model.decoder.layers[1].self_attention.linear_qkv.weight
        # The largest element: a change of its last bit reaches some token.
        at = int(weight.abs().argmax())
        weight.view(-1)[at] *= 1 + 2.0**-7
    with pytest.raises(AssertionError):
        assert_bitwise_equal(scores(model, batch), scores(make_bridged("qwen3"), batch))


def test_gpt_model_control_stock_rope_order(
    make_gpt: Callable, make_bridged: Callable, make_sequences: Callable
) -> None:
    """Reading the fused matrix without the interleave of groups gives other log-probs."""
    batch = make_sequences("qwen3").padded("left")
    model = make_gpt("qwen3")
    model.state.rows.clear()
    with pytest.raises(AssertionError):
        assert_bitwise_equal(scores(model, batch), scores(make_bridged("qwen3"), batch))


@pytest.mark.parametrize("side", ["left", "right"])
def test_gpt_model_is_layout_invariant(
    side: str, family: str, make_gpt: Callable, make_sequences: Callable
) -> None:
    sequences, model = make_sequences(family), make_gpt(family)
    ids, mask = sequences.padded(side)
    padded = scores(model, (ids, mask))[mask.bool()]
    packed_ids, positions = sequences.packed()
    with torch.no_grad():
        packed = token_logprobs(model, packed_ids, position_ids=positions, temperature=0.7)
        single = token_logprobs(model, ids, mask, temperature=0.7, micro_batch_size=1)
    assert_bitwise_equal(packed.log_probs[0], padded)
    assert_bitwise_equal(single.log_probs[mask.bool()], padded)


def test_logits_of_columns_equal_packed_and_hf(
    family: str, make_gpt: Callable, make_bridged: Callable
) -> None:
    """[s, b, h] columns, thd packing and the Hugging Face forward: the same fp32 logits."""
    ids = torch.randint(3, 1000, (3, 21), generator=torch.Generator().manual_seed(0))
    model = make_gpt(family)
    with torch.no_grad():
        columns = model(ids, None, None)
        cu = torch.arange(4, dtype=torch.int32) * 21
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
        flat = model(ids.view(1, -1), None, None, packed_seq_params=packed)
        expected = make_bridged(family)(ids).logits
    assert columns.dtype == torch.float32
    assert_bitwise_equal(columns, expected)
    assert_bitwise_equal(flat.view(columns.shape), expected)


def test_rows_after_the_last_sequence_reach_nothing(make_gpt: Callable) -> None:
    model = make_gpt("qwen2")
    ids = torch.randint(3, 1000, (1, 32), generator=torch.Generator().manual_seed(1))
    cu = torch.tensor([0, 5, 27], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    with torch.no_grad():
        whole = model(ids, None, None, packed_seq_params=packed)
        ids[0, 27:] = 9
        again = model(ids, None, None, packed_seq_params=packed)
    assert_bitwise_equal(whole[0, :27], again[0, :27])


def test_padded_vocabulary_rows_reach_nothing(
    make_gpt: Callable, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences("qwen3").padded("right")
    model = make_gpt("qwen3", vocab_rows=1408)
    assert model.output_layer.weight.shape[0] == 1408
    with torch.no_grad():
        model.output_layer.weight[1280:] = torch.nan
    assert_bitwise_equal(scores(model, batch), scores(make_bridged("qwen3"), batch))


@pytest.mark.parametrize(("heads", "head_dim", "width"), [(3, 80, 328), (3, 96, 320)])
def test_cuts_inside_a_block_of_columns(heads: int, head_dim: int, width: int) -> None:
    """q, k, v and gate, up whose borders are no multiples of 64 columns."""
    config = Qwen2Config(
        vocab_size=1280,
        hidden_size=heads * head_dim,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    stock = named(Qwen2ForCausalLM(config))
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(0.08 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    model = bridge_gpt_model(gpt_model(config, params_dtype=torch.float32), config)
    model.load_state_dict(from_hf_state(stock.state_dict(), model.state.facts))
    assert len(model.state.parts) == (4 if width % 64 else 2)
    bridged = bridge_model(stock)
    ids = torch.randint(3, 1000, (2, 40))
    batch = (ids, torch.ones_like(ids))
    assert_bitwise_equal(scores(model, batch), scores(bridged, batch))
    gradients(model, batch)
    gradients(bridged, batch)
    ours = dict(hf_named({n: p.grad for n, p in model.named_parameters()}, model.state.facts))
    for name, parameter in bridged.named_parameters():
        error = (ours[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < bound(2) * (2 if "k_proj.bias" in name else 1), name


def gradients(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    result = token_logprobs(model, *batch, temperature=0.9)
    weight = torch.randn(result.log_probs.shape, generator=torch.Generator().manual_seed(3))
    loss = (result.log_probs * weight.to(batch[0].device)).sum() + 0.01 * result.entropy.sum()
    loss.backward()


def test_gpt_model_grad_matches_hf(
    family: str, make_gpt: Callable, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences(family).padded("right")
    model, bridged = make_gpt(family, torch.float32), make_bridged(family, torch.float32)
    gradients(model, batch)
    gradients(bridged, batch)
    ours = dict(hf_named({n: p.grad for n, p in model.named_parameters()}, model.state.facts))
    theirs = {name: p.grad for name, p in bridged.named_parameters()}
    assert ours.keys() == theirs.keys()
    # Where no fused projection lies between the loss and the parameter, the same functions run in
    # the same order.
    last = f"model.layers.{bridged.config.num_hidden_layers - 1}"
    same = ["model.norm.weight"]
    if model.state.facts.moe:
        parts = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
        same += [f"{last}.mlp.{part}" for part in parts]
    else:
        same.append(f"{last}.mlp.down_proj.weight")
    if not bridged.config.tie_word_embeddings:
        same.append("lm_head.weight")
    for name in same:
        assert_bitwise_equal(ours[name], theirs[name], name)
    limit = bound(bridged.config.num_hidden_layers)
    # nn.Embedding gives its padding row no gradient; megatron-core knows no such row.
    table = "model.embed_tokens.weight"
    padding = bridged.config.pad_token_id
    ours[table] = ours[table].clone()
    ours[table][padding] = theirs[table][padding]
    errors = {
        name: float((ours[name] - grad).norm() / grad.norm()) / (2 if "k_proj.bias" in name else 1)
        for name, grad in theirs.items()
    }
    assert max(errors.values()) < limit, {n: e for n, e in errors.items() if e >= limit}


def test_gpt_model_grad_control_other_loss(
    make_gpt: Callable, make_bridged: Callable, make_sequences: Callable
) -> None:
    """A temperature of 0.8 instead of 0.9 lies outside the bound."""
    batch = make_sequences("qwen3").padded("right")
    model, other = make_gpt("qwen3", torch.float32), make_gpt("qwen3", torch.float32)
    gradients(model, batch)
    token_logprobs(other, *batch, temperature=0.8).log_probs.sum().backward()
    a, b = (m.decoder.layers[0].mlp.linear_fc1.weight.grad for m in (model, other))
    assert (a - b).norm() / b.norm() > bound(3)


def test_weights_digest_as_hf(family: str, make_gpt: Callable, make_bridged: Callable) -> None:
    ours, theirs = weight_receipt(make_gpt(family)), weight_receipt(make_bridged(family))
    assert ours.digest.differences(theirs.digest) == []
    assert ours.digest.total == theirs.digest.total
    assert ours.contract_digest == theirs.contract_digest


def test_an_optimizer_step_on_copies_is_noticed(
    make_gpt: Callable, make_bridged: Callable, make_sequences: Callable
) -> None:
    """megatron-core's optimizers step on fp32 copies and write through `.data`."""
    batch = make_sequences("qwen3").padded("right")
    model, bridged = make_gpt("qwen3"), make_bridged("qwen3")
    before = scores(model, batch)
    copies = {name: p.detach().float() for name, p in model.named_parameters()}
    for name, copy in copies.items():
        copy.grad = copy.sign() if name.endswith("linear_fc2.weight") else torch.zeros_like(copy)
    version = weight_version(model).value
    torch.optim.SGD(copies.values(), lr=2.0**-5).step()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(copies[name])
    assert weight_version(model).value == version + 1
    after = scores(model, batch)
    assert not torch.equal(before, after)
    bridged.load_state_dict(dict(model.hf_parameters()))
    assert_bitwise_equal(after, scores(bridged, batch))
    check_prepared(model)


def test_control_a_change_behind_every_counter_is_found(
    make_gpt: Callable, make_sequences: Callable
) -> None:
    model = make_gpt("qwen3")
    scores(model, make_sequences("qwen3").padded("right"))
    check_prepared(model)
    model.decoder.layers[0].self_attention.linear_qkv.weight.data.mul_(2)
    with pytest.raises(StaleWeightsError, match="linear_qkv"):
        check_prepared(model)


def test_backward_after_a_step_is_refused(make_gpt: Callable, make_sequences: Callable) -> None:
    model = make_gpt("qwen3")
    result = token_logprobs(model, *make_sequences("qwen3").padded("right"))
    weight_version(model).bump()
    with pytest.raises(StaleWeightsError, match="optimizer step"):
        result.log_probs.sum().backward()


def test_wrapped_in_float16_module(
    make_gpt: Callable, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences("qwen3").padded("right")
    model = make_gpt("qwen3", bf16=True)
    wrapped = Float16Module(model.config, model)
    assert_bitwise_equal(scores(wrapped, batch), scores(make_bridged("qwen3"), batch))
    assert weight_receipt(wrapped).digest.total == weight_receipt(model).digest.total


def test_recompute_changes_no_bit_and_no_gradient(
    make_gpt: Callable, make_sequences: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    # megatron-core's checkpoint saves and restores CUDA's generator state.
    monkeypatch.setattr(
        "megatron.core.tensor_parallel.random._set_cuda_rng_state", lambda *_, **__: None
    )
    monkeypatch.setattr(
        "megatron.core.tensor_parallel.random._get_cuda_rng_state", lambda *_, **__: None
    )
    batch = make_sequences("qwen3").padded("right")
    plain = make_gpt("qwen3").train()
    options = {"recompute_granularity": "full", "recompute_method": "uniform"}
    again = make_gpt("qwen3", recompute_num_layers=1, **options).train()
    gradients(plain, batch)
    gradients(again, batch)
    for (name, ours), theirs in zip(again.named_parameters(), plain.parameters(), strict=True):
        assert_bitwise_equal(ours.grad, theirs.grad, name)


def test_report_lists_our_layers(make_gpt: Callable, make_bridged: Callable) -> None:
    model = make_gpt("qwen3")
    report = consistency_report(model)
    assert report.digest == make_bridged("qwen3")._bridge.contract.digest
    assert report.foreign_layers == ()
    assert report.layers["VllmLayerNormColumnParallelLinear"] == 6
    assert len(report.attention) == 3
    assert report.sampler.endswith("VllmOutputLayer")


def test_gpt_model_rejects_masks_labels_and_foreign_borders(make_gpt: Callable) -> None:
    model = make_gpt("qwen3")
    ids = torch.full((1, 8), 5)
    with pytest.raises(InvalidInputError, match="attention_mask"):
        model(ids, None, torch.ones(1, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(ConfigurationError, match="token_logprobs"):
        model(ids, None, None, labels=ids)
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    padded = torch.tensor([0, 6, 8], dtype=torch.int32)
    for options, match in (
        ({"cu_seqlens_q": cu, "cu_seqlens_q_padded": padded}, "alignment padding"),
        ({"cu_seqlens_q": cu * 2}, "at most 8"),
        ({"cu_seqlens_q": cu.flip(0)}, "ascending"),
        ({"cu_seqlens_q": cu, "qkv_format": "sbhd"}, "thd"),
    ):
        packed = PackedSeqParams(**({"qkv_format": "thd"} | options))
        with pytest.raises(InvalidInputError, match=match):
            model(ids, None, None, packed_seq_params=packed)
    long = torch.full((1, 2049), 5)
    with pytest.raises(InvalidInputError, match="max_position_embeddings"):
        model(long, None, None)
