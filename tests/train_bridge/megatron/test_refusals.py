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
from tiny_gpt import gpt_model, named, transformer_config

from consistent_kernels.errors import ConfigurationError, ContractMismatchError, UnsupportedError
from train_bridge import token_logprobs
from train_bridge.megatron import (
    VllmSpecProvider,
    bridge_gpt_model,
    get_gpt_layer_vllm_spec,
    megatron_bridge,
    pre_wrap_hook,
    register_auto_mapping,
)
from train_bridge.megatron.layers import VllmRMSNorm

pytestmark = pytest.mark.megatron

REFUSED: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "sequence_parallel": True,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "add_bias_linear": True,
    "layernorm_zero_centered_gamma": True,
    "fp32_residual_connection": True,
    "multi_latent_attention": True,
    "attention_output_gate": True,
    "qk_l2_norm": True,
    "softmax_scale": 0.5,
    "num_moe_experts": 8,
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


def test_bridge_rejects_experts(stock: torch.nn.Module, make_stock: Callable) -> None:
    experts = named(make_stock("qwen3_moe")).config
    with pytest.raises(ConfigurationError, match="mixture-of-experts"):
        bridge_gpt_model(gpt_model(stock.config), experts)


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
    assert provider.grouped_mlp_modules(False).func is local.grouped_mlp_modules(False).func


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
    from train_bridge.megatron import layers

    assert all(hasattr(layers, name) for name in seen)
