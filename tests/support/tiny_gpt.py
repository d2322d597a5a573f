"""GPTModels of our spec for the tiny Hugging Face models, on CPU; needs megatron-core."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import Qwen3MoeConfig

from consistent_kernels.model_facts import model_facts
from train_bridge.megatron import config, get_gpt_block_vllm_spec


def all_moe_config(*, renormalize: bool = True) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B's shape in small: every layer with experts."""
    return Qwen3MoeConfig(
        vocab_size=1280,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=renormalize,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


def named(stock: torch.nn.Module) -> torch.nn.Module:
    """Write the architecture into the configuration, as a saved checkpoint has it."""
    stock.config.architectures = [type(stock).__name__]
    return stock


def transformer_config(hf_config: Any, **changes: Any) -> TransformerConfig:
    """The megatron-core configuration of a Hugging Face one, on CPU."""
    options = {"use_cpu_initialization": True} | changes
    return config.transformer_config(model_facts(hf_config, "bfloat16"), hf_config, **options)


def gpt_model(hf_config: Any, *, vocab_rows: int | None = None, **changes: Any) -> GPTModel:
    """A GPTModel of our spec, not bridged, without weights."""
    options = transformer_config(hf_config, **changes)
    return GPTModel(
        options,
        get_gpt_block_vllm_spec(options),
        vocab_size=vocab_rows or hf_config.vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="none",
    )
