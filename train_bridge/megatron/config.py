"""megatron-core's configuration of a Hugging Face model, without a bridge package."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from consistent_kernels.model_facts import ModelFacts
from train_bridge.megatron.conversion import moe_layers


def transformer_config(facts: ModelFacts, hf_config: Any, **options: Any) -> TransformerConfig:
    """Return the configuration from which `get_gpt_block_vllm_spec` builds this model.

    Args:
        facts: of the model.
        hf_config: the Hugging Face configuration of the same model.
        options: fields of TransformerConfig that have other values: recomputation, dtypes, where
            parameters are made. What would part the two sides is refused by the spec.
    """
    fields: dict[str, Any] = {
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
        # Weights come from a checkpoint.
        "perform_initialization": False,
        "attention_softmax_in_fp32": False,
        "gradient_accumulation_fusion": False,
    }
    if facts.moe:
        fields |= _experts(facts)
    return TransformerConfig(**(fields | options))


def _experts(facts: ModelFacts) -> dict[str, Any]:
    router, with_experts = dict(facts.moe), moe_layers(facts)
    return {
        "num_moe_experts": router["num_experts"],
        "moe_ffn_hidden_size": router["intermediate_size"],
        "moe_layer_freq": [int(layer in with_experts) for layer in range(facts.num_layers)],
        "moe_router_topk": router["top_k"],
        "moe_router_pre_softmax": not router["renormalize"],
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
