"""GPTModels of our spec for the tiny Hugging Face models, on CPU; needs megatron-core."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from consistent_kernels.model_facts import ModelFacts, model_facts
from train_bridge.megatron import get_gpt_block_vllm_spec
from train_bridge.megatron.conversion import moe_layers


def named(stock: torch.nn.Module) -> torch.nn.Module:
    """Write the architecture into the configuration, as a saved checkpoint has it."""
    stock.config.architectures = [type(stock).__name__]
    return stock


def transformer_config(hf_config: Any, **changes: Any) -> TransformerConfig:
    """The megatron-core configuration of a Hugging Face one, on CPU."""
    facts = model_facts(hf_config, "bfloat16")
    options: dict[str, Any] = {
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "ffn_hidden_size": facts.intermediate_size,
        "num_attention_heads": facts.num_heads,
        "num_query_groups": facts.num_kv_heads,
        "kv_channels": facts.head_dim,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "add_qkv_bias": facts.qkv_bias,
        "qk_layernorm": facts.qk_norm,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "attention_softmax_in_fp32": False,
    }
    if facts.moe:
        options |= _moe_options(hf_config, facts)
    return TransformerConfig(**(options | changes))


def _moe_options(hf_config: Any, facts: ModelFacts) -> dict[str, Any]:
    with_experts = moe_layers(facts)
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_layer_freq": [int(layer in with_experts) for layer in range(facts.num_layers)],
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def gpt_model(hf_config: Any, *, vocab_rows: int | None = None, **changes: Any) -> GPTModel:
    """A GPTModel of our spec, not bridged, without weights."""
    config = transformer_config(hf_config, **changes)
    return GPTModel(
        config,
        get_gpt_block_vllm_spec(config),
        vocab_size=vocab_rows or hf_config.vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="none",
    )
