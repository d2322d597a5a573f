"""Tiny random checkpoints with peaked logits, for parity tests of engine and trainer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
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

from consistent_kernels.quantization import quantize_weight

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
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
            # One dense layer among the experts, as the configuration allows.
            "mlp_only_layers": [1],
            "tie": False,
        },
    ),
}
_BLOCK_FP8 = {
    # Widths in multiples of a block; fused and separate weights share shapes, so that DeepGEMM
    # compiles few kernels.
    "qwen3_fp8": ("qwen3", {"hidden_size": 256, "intermediate_size": 256}),
    "qwen3_moe_fp8": (
        "qwen3_moe",
        {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128},
    ),
}
"""Block-FP8 family to the one that it quantizes, and what differs."""
_SCALE_FORMATS = {"qwen3_fp8": "ue8m0", "qwen3_moe_fp8": "fp32"}
"""Qwen publishes fp32 scales, DeepSeek-V3.2 powers of two."""
FAMILIES = tuple(_CONFIGS)


def tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Return a random model of `family` (one of FAMILIES, or the masters of a block-FP8 one).

    Its choices are peaked:

    norm weights lie around 1 +- 0.2, biases are non-zero, and the head is scaled so that the
    mean log-prob of a sampled token is above -3: flat logits hide mismatches.
    """
    family, widths = _BLOCK_FP8.get(family, (family, {}))
    model_class, config_class, own = _CONFIGS[family]
    own = own | widths
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
    """Write `tiny_model` as an ordinary checkpoint without a tokenizer; returns the folder.

    In bf16, or as Qwen publishes block-FP8 models.
    """
    model = tiny_model(family, seed=seed)
    model.save_pretrained(folder)
    if family in _BLOCK_FP8:
        quantize_checkpoint(folder, _SCALE_FORMATS[family])
    return folder


def quantize_checkpoint(folder: Path, scale_format: str) -> None:
    """Turn a bf16 checkpoint of one file into block FP8, as Qwen and DeepSeek publish them."""
    file = folder / "model.safetensors"
    quantized: dict[str, torch.Tensor] = {}
    kept = []
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj.weight"):
            quantized[name] = tensor
            kept.append(name.removesuffix(".weight"))
            continue
        values, scale = quantize_weight(tensor, scale_format=scale_format, impl="reference")
        quantized |= {name: values, f"{name}_scale_inv": scale}
    save_file(quantized, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": [name for name in kept if "embed_tokens" not in name],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    } | ({} if scale_format == "fp32" else {"scale_fmt": scale_format})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
