"""Everything about a megatron-core configuration that no program serves, in one list."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from consistent_kernels.model_facts import ModelFacts

_ONE_RANK = (
    ("tensor_model_parallel_size", "a row's sum over TP ranks has no written order yet"),
    ("pipeline_model_parallel_size", "stages are not bridged yet"),
    ("context_parallel_size", "attention over CP ranks is not bridged yet"),
    ("expert_model_parallel_size", "expert parallelism is not bridged yet"),
    ("gtp_weight_remat_size", "gathered weight shards are not bridged"),
)
_OFF = (
    ("sequence_parallel", "it splits rows over TP ranks"),
    ("fp8", "no FP8 program is in this contract"),
    ("fp4", "no FP4 program is in this contract"),
    ("hidden_dropout", "the engine has none"),
    ("attention_dropout", "the engine has none"),
    ("add_bias_linear", "only q, k and v may have a bias (add_qkv_bias)"),
    ("layernorm_zero_centered_gamma", "norm weights are used as they are"),
    ("fp32_residual_connection", "the residual sum is rounded to bf16, as in the engine"),
    ("apply_residual_connection_post_layernorm", "the residual is taken before the norm"),
    ("fused_residual_rmsnorm", "the layer adds the residual itself"),
    ("multi_latent_attention", "no program serves it here"),
    ("attention_output_gate", "no program serves it here"),
    ("qk_l2_norm", "no program serves it here"),
    ("qk_clip", "it changes weights between forward and update"),
    ("apply_query_key_layer_scaling", "scores are scaled once, in fp32"),
    ("softmax_scale", "the scale is head_dim ** -0.5"),
    ("num_moe_experts", "mixture-of-experts layers are not bridged yet"),
    ("mtp_num_layers", "multi-token prediction is not bridged"),
    ("use_mup", "MuP scales activations"),
    ("activation_func_clamp_value", "the engine does not clamp"),
    ("glu_linear_offset", "the engine has none"),
    ("rotary_interleaved", "rotation is of halves (neox style)"),
    ("no_rope_freq", "every layer is rotated"),
    ("batch_invariant_mode", "it replaces the operators below ours"),
    ("enable_autocast", "it rounds operands"),
    ("inference_fuse_tp_communication", "it replaces the norms"),
    ("use_transformer_engine_op_fuser", "it replaces the MLP"),
    ("fine_grained_activation_offloading", "our attention does not offload"),
    ("cpu_offloading", "our modules do not offload"),
    ("defer_embedding_wgrad_compute", "the head computes its gradient with the forward's weight"),
    ("delay_wgrad_compute", "our linears compute it in the backward"),
)


def config_violations(config: TransformerConfig) -> list[str]:
    """Return what the configuration asks for and no program serves; empty when it is fine."""
    found = []
    for name, why in _ONE_RANK:
        value = getattr(config, name, 1) or 1
        if value != 1:
            found.append(f"{name}={value}: {why}; set it to 1")
    for name, why in _OFF:
        value = getattr(config, name, None)
        if value:
            found.append(f"{name}={value}: {why}")
    if config.normalization != "RMSNorm":
        found.append(f"normalization={config.normalization!r}: set it to 'RMSNorm'")
    if not config.gated_linear_unit or config.activation_func is not F.silu:
        found.append("the MLP must be SwiGLU: gated_linear_unit=True, activation_func=F.silu")
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none"):
        found.append(f"cuda_graph_impl={config.cuda_graph_impl!r}: not tried; set it to 'none'")
    selective = config.recompute_granularity == "selective"
    if selective and "core_attn" in (config.recompute_modules or ()):
        found.append("recompute_modules names core_attn: our attention keeps no scores; drop it")
    return found


def disagreements(config: TransformerConfig, facts: ModelFacts, hf_config: Any) -> list[str]:
    """Return where the megatron-core configuration describes another model than Hugging Face's."""
    pairs = (
        ("num_layers", config.num_layers, facts.num_layers),
        ("hidden_size", config.hidden_size, facts.hidden_size),
        ("ffn_hidden_size", config.ffn_hidden_size, facts.intermediate_size),
        ("num_attention_heads", config.num_attention_heads, facts.num_heads),
        ("num_query_groups", config.num_query_groups, facts.num_kv_heads),
        ("kv_channels", config.kv_channels, facts.head_dim),
        ("layernorm_epsilon", config.layernorm_epsilon, hf_config.rms_norm_eps),
        ("add_qkv_bias", bool(config.add_qkv_bias), facts.qkv_bias),
        ("qk_layernorm", bool(config.qk_layernorm), facts.qk_norm),
    )
    return [
        f"{name}={ours}, but the Hugging Face configuration says {theirs}"
        for name, ours, theirs in pairs
        if ours != theirs
    ]
