"""Tiny random checkpoints with peaked logits, for parity tests of engine and trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 1280
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CONFIGS = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "tie": True},
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie": True},
    ),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "tie": False},
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
            # One dense layer among the experts, as the configuration allows.
            "mlp_only_layers": [1],
            "tie": False,
        },
    ),
}
FAMILIES = tuple(_CONFIGS)


def tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Return a random model of `family` (one of FAMILIES) whose choices are peaked.

    Norm weights lie around 1 +- 0.2, biases are non-zero, and the head is scaled so that the
    mean log-prob of a sampled token is above -3: flat logits hide mismatches.
    """
    model_class, config_class, own = _CONFIGS[family]
    own = dict(own)
    tie = own.pop("tie")
    if family == "qwen2":
        # Qwen2 derives its head dim from hidden_size.
        own.pop("head_dim")
        own["hidden_size"] = 256
    config = config_class(**(_SHAPE | own), tie_word_embeddings=tie)
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                value = 1.0 + 0.2 * torch.randn(parameter.shape, generator=generator)
            elif name.endswith("bias"):
                value = 0.1 * torch.randn(parameter.shape, generator=generator)
            else:
                value = 0.08 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(value)
        head = model.get_output_embeddings().weight
        head.mul_(0.35 / head.std())
    return model.to(dtype).eval()


def save_tiny_model(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Write `tiny_model` as an ordinary bf16 checkpoint without a tokenizer; returns the folder."""
    model = tiny_model(family, seed=seed)
    model.save_pretrained(folder)
    return folder
