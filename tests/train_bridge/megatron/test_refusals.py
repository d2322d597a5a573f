"""What a megatron-core configuration may not ask for, and models that are not ours."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core (extra: megatron)")

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from tiny_gpt import gpt_model, named, transformer_config

from consistent_kernels.errors import ConfigurationError, ContractMismatchError, UnsupportedError
from train_bridge import token_logprobs
from train_bridge.megatron import (
    VllmSpecProvider,
    bridge_gpt_model,
    get_gpt_block_vllm_spec,
    get_gpt_layer_vllm_spec,
    megatron_bridge,
    pre_wrap_hook,
    register_auto_mapping,
)
from train_bridge.megatron.layers import VllmRMSNorm
from train_bridge.megatron.moe import VllmGroupedMLP, VllmMoELayer

pytestmark = pytest.mark.megatron

REFUSED: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 2,
    "sequence_parallel": True,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "add_bias_linear": True,
    "layernorm_zero_centered_gamma": True,
    "fp32_residual_connection": True,
    "fp16": True,
    "quant_recipe": "some recipe",
    "activation_func_fp8_input_store": True,
    "softmax_type": "off-by-one",
    "window_attn_skip_freq": 2,
    "experimental_attention_variant": "dsa",
    "linear_attention_freq": 4,
    "is_hybrid_model": True,
    "heterogeneous_block_specs": True,
    "mrope_section": [16, 24, 24],
    "use_kitchen": True,
    "use_kitchen_attention": True,
    "flash_decode": True,
    "hybrid_context_parallel": True,
    "multi_latent_attention": True,
    "attention_output_gate": True,
    "qk_l2_norm": True,
    "softmax_scale": 0.5,
    "mtp_num_layers": 1,
    "use_mup": True,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "rotary_interleaved": True,
    "batch_invariant_mode": True,
    "cpu_offloading": True,
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "cuda_graph_impl": "local",
}

REFUSED_WITH_EXPERTS: dict[str, Any] = {
    "moe_aux_loss_coeff": 1e-3,
    "moe_z_loss_coeff": 1e-3,
    "moe_input_jitter_eps": 0.1,
    "moe_router_enable_expert_bias": True,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 0.1,
    "moe_enable_routing_replay": True,
    "moe_token_dropping": True,
    "moe_expert_capacity_factor": 1.0,
    "moe_expert_rank_capacity_factor": 1.0,
    "moe_shared_expert_intermediate_size": 64,
    "moe_latent_size": 64,
    "moe_pad_expert_input_to_capacity": True,
    "moe_router_padding_for_quantization": True,
    "moe_router_padding_for_fp8": True,
    "moe_router_topk_limited_devices": 1,
    "moe_apply_probs_on_input": True,
    "moe_mlp_glu_interleave_size": 32,
    "moe_single_grouped_weight": True,
    "overlap_moe_expert_parallel_comm": True,
    "overlap_dispatch_backward_with_experts_wgrad": True,
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_router_dtype": "fp64",
    "moe_layer_freq": [1, 0],
}


@pytest.fixture
def experts(make_stock: Callable) -> torch.nn.Module:
    """A tiny Qwen3-MoE, its middle layer dense."""
    return named(make_stock("qwen3_moe"))


@pytest.fixture
def stock(make_stock: Callable) -> torch.nn.Module:
    """A tiny Qwen3 with its architecture in the configuration."""
    return named(make_stock("qwen3"))


@pytest.mark.parametrize("name", REFUSED)
def test_spec_rejects(name: str, stock: torch.nn.Module) -> None:
    config = transformer_config(stock.config)
    # Set afterwards: megatron-core's own checks of combinations come first otherwise.
    setattr(config, name, REFUSED[name])
    with pytest.raises(ConfigurationError) as caught:
        get_gpt_layer_vllm_spec(config)
    assert len(caught.value.violations) == 1
    label = "SwiGLU" if name == "gated_linear_unit" else name
    assert label in caught.value.violations[0]


def test_control_the_same_configuration_is_taken(stock: torch.nn.Module) -> None:
    get_gpt_layer_vllm_spec(transformer_config(stock.config))


def test_spec_lists_all_reasons_at_once(stock: torch.nn.Module) -> None:
    config = transformer_config(stock.config)
    for name, value in REFUSED.items():
        setattr(config, name, value)
    with pytest.raises(ConfigurationError) as caught:
        get_gpt_layer_vllm_spec(config)
    assert len(caught.value.violations) == len(REFUSED)


@pytest.mark.parametrize("name", REFUSED_WITH_EXPERTS)
def test_spec_with_experts_rejects(name: str, experts: torch.nn.Module) -> None:
    config = transformer_config(experts.config)
    setattr(config, name, REFUSED_WITH_EXPERTS[name])
    with pytest.raises(ConfigurationError) as caught:
        get_gpt_block_vllm_spec(config)
    assert [line.split("=")[0] for line in caught.value.violations] == [name]


def test_control_the_same_configuration_with_experts_is_taken(experts: torch.nn.Module) -> None:
    config = transformer_config(experts.config, moe_router_dtype="fp32")
    get_gpt_block_vllm_spec(config)
    # A coefficient of 0 for each of several auxiliary losses.
    config.moe_router_load_balancing_type = ["aux_loss", "seq_aux_loss"]
    config.moe_aux_loss_coeff = [0.0, 0.0]
    get_gpt_block_vllm_spec(config)


def test_one_spec_for_layers_of_two_kinds_is_refused(experts: torch.nn.Module) -> None:
    config = transformer_config(experts.config)
    with pytest.raises(ConfigurationError, match="get_gpt_block_vllm_spec"):
        get_gpt_layer_vllm_spec(config)
    config.moe_layer_freq = 1
    assert get_gpt_layer_vllm_spec(config).submodules.mlp.func is VllmMoELayer


def test_bridge_rejects_another_window(stock: torch.nn.Module) -> None:
    model = gpt_model(stock.config)
    model.config.window_size = (16, 0)
    with pytest.raises(ConfigurationError, match=r"window_size=16, but .* says None"):
        bridge_gpt_model(model, stock.config)
    model.config.window_size = (-1, 0)
    bridge_gpt_model(model, stock.config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_moe_experts", 8),
        ("moe_router_topk", 2),
        ("moe_ffn_hidden_size", 64),
        ("moe_layer_freq", [1, 1, 1]),
        ("moe_router_pre_softmax", True),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_topk_scaling_factor", 2.5),
        ("moe_router_num_groups", 4),
        ("moe_router_group_topk", 2),
    ],
)
def test_bridge_rejects_other_experts(name: str, value: Any, experts: torch.nn.Module) -> None:
    model = gpt_model(experts.config)
    if name in ("num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq"):
        model = gpt_model(experts.config, **{name: value})
    setattr(model.config, name, value)
    with pytest.raises(ConfigurationError) as caught:
        bridge_gpt_model(model, experts.config)
    assert [line.split("=")[0] for line in caught.value.violations] == [name]


def test_bridge_rejects_megatron_cores_own_experts(experts: torch.nn.Module) -> None:
    """Our provider's experts under its MoELayer would be fed permuted tokens."""
    config = transformer_config(experts.config, moe_token_dispatcher_type="allgather")
    spec = get_gpt_block_vllm_spec(config)
    stock = get_moe_module_spec_for_backend(VllmSpecProvider(), config.num_moe_experts, True)
    for layer in spec.layer_specs:
        layer.submodules.mlp = stock
    model = GPTModel(
        config, spec, vocab_size=1280, max_sequence_length=64, position_embedding_type="none"
    )
    with pytest.raises(ConfigurationError, match="MoELayer"):
        bridge_gpt_model(model, experts.config)


def test_recompute_of_core_attention_is_rejected(stock: torch.nn.Module) -> None:
    config = transformer_config(stock.config, recompute_granularity="selective")
    with pytest.raises(ConfigurationError, match="core_attn"):
        get_gpt_layer_vllm_spec(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_layers", 2), ("layernorm_epsilon", 1e-5), ("qk_layernorm", False)],
)
def test_bridge_rejects_another_model(name: str, value: Any, stock: torch.nn.Module) -> None:
    model = gpt_model(stock.config, **{name: value})
    with pytest.raises(ConfigurationError, match=f"{name}={value}"):
        bridge_gpt_model(model, stock.config)


def test_bridge_rejects_block_fp8(stock: torch.nn.Module) -> None:
    model = gpt_model(stock.config)
    quantized = copy.deepcopy(stock.config)
    quantized.served_quantization = {"quant_method": "fp8"}
    with pytest.raises(ConfigurationError, match="block-FP8 models are not bridged yet"):
        bridge_gpt_model(model, quantized)


def test_bridge_rejects_untied_against_tied(stock: torch.nn.Module) -> None:
    model = gpt_model(stock.config)
    tied = copy.deepcopy(stock.config)
    tied.tie_word_embeddings = True
    with pytest.raises(ConfigurationError, match="share_embeddings_and_output_weights"):
        bridge_gpt_model(model, tied)


def test_bridge_rejects_a_smaller_vocabulary(stock: torch.nn.Module) -> None:
    with pytest.raises(ConfigurationError, match="1280 ids"):
        bridge_gpt_model(gpt_model(stock.config, vocab_rows=1024), stock.config)


def test_bridge_rejects_stock_layers(stock: torch.nn.Module) -> None:
    config = transformer_config(stock.config)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=1280,
        max_sequence_length=64,
        position_embedding_type="none",
    )
    with pytest.raises(ConfigurationError, match="get_gpt_layer_vllm_spec"):
        bridge_gpt_model(model, stock.config)


def test_bridge_rejects_what_is_no_gpt_model(stock: torch.nn.Module) -> None:
    with pytest.raises(ConfigurationError, match="GPTModel"):
        bridge_gpt_model(stock, stock.config)


def test_bridge_rejects_dense_layers_for_experts(
    stock: torch.nn.Module, experts: torch.nn.Module
) -> None:
    with pytest.raises(ConfigurationError, match="num_moe_experts=0"):
        bridge_gpt_model(gpt_model(stock.config), experts.config)


def test_bridge_rejects_another_contract(make_gpt: Callable, make_bridged: Callable) -> None:
    with pytest.raises(ContractMismatchError):
        bridge_gpt_model(make_gpt("qwen3"), None, contract=make_bridged("llama")._bridge.contract)


def test_a_layer_alone_is_refused(stock: torch.nn.Module) -> None:
    model = gpt_model(stock.config)
    with pytest.raises(ConfigurationError, match="bridge_gpt_model"):
        model.decoder.layers[0].self_attention.linear_qkv(torch.zeros(1, 1, 192))
    with pytest.raises(ConfigurationError, match="not bridged"):
        token_logprobs(model, torch.full((1, 8), 5))


def test_pre_wrap_hook_bridges_and_replaces_a_foreign_final_norm(stock: torch.nn.Module) -> None:
    """Megatron-Bridge passes a layer spec alone, for which megatron-core takes its own norm."""
    config = transformer_config(stock.config)
    model = GPTModel(
        config,
        get_gpt_layer_vllm_spec(config),
        vocab_size=1280,
        max_sequence_length=64,
        position_embedding_type="none",
    )
    before = model.decoder.final_layernorm.weight
    assert not isinstance(model.decoder.final_layernorm, VllmRMSNorm)
    (bridged,) = pre_wrap_hook(stock.config)([model])
    assert bridged is model
    assert isinstance(model.decoder.final_layernorm, VllmRMSNorm)
    assert model.decoder.final_layernorm.weight is before


def test_provider_falls_back_where_no_op_is() -> None:
    local = LocalSpecProvider()
    provider = VllmSpecProvider(fallback=local)
    assert provider.layer_norm(rms_norm=True) is VllmRMSNorm
    assert provider.layer_norm() is local.layer_norm()
    assert provider.grouped_mlp_modules(False) is VllmGroupedMLP


def test_auto_mapping_says_that_megatron_bridge_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(megatron_bridge, "_MODULE", "megatron.no_such_package")
    with pytest.raises(UnsupportedError, match=r"megatron-bridge 0\.6\.2"):
        register_auto_mapping()


def test_auto_mapping_registers_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of Megatron-Bridge's class; the real one is not installed here."""
    seen: dict[str, str] = {}
    stand_in = types.SimpleNamespace(
        AutoMapping=types.SimpleNamespace(register_module_type=seen.__setitem__)
    )
    monkeypatch.setattr(megatron_bridge.importlib, "import_module", lambda _: stand_in)
    register_auto_mapping()
    assert seen == megatron_bridge.MODULE_TYPES
    from train_bridge.megatron import layers, moe

    assert all(hasattr(layers, name) or hasattr(moe, name) for name in seen)
