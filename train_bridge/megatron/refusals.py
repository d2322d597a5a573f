"""Everything about a megatron-core configuration that no program serves, in one list."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from consistent_kernels.contract import float_bits
from consistent_kernels.model_facts import ModelFacts
from train_bridge.megatron.conversion import moe_layers

_ONE_RANK = (
    ("tensor_model_parallel_size", "a row's sum over TP ranks has no written order yet"),
    ("pipeline_model_parallel_size", "stages are not bridged yet"),
    ("context_parallel_size", "attention over CP ranks is not bridged yet"),
    ("expert_model_parallel_size", "expert parallelism is not bridged yet"),
    ("expert_tensor_parallel_size", "a row's sum over ranks has no written order yet"),
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
    ("fp16", "weights and activations are bf16"),
    ("quant_recipe", "no quantized program is in this contract"),
    ("activation_func_fp8_input_store", "no FP8 program is in this contract"),
    ("window_attn_skip_freq", "all layers see one window"),
    ("multi_latent_attention", "no program serves it here"),
    ("experimental_attention_variant", "no program serves it here"),
    ("linear_attention_freq", "no program serves it here"),
    ("is_hybrid_model", "every layer has attention and an MLP"),
    ("heterogeneous_block_specs", "all layers have one shape"),
    ("mrope_section", "positions are of text alone"),
    ("use_kitchen", "it replaces linears and attention"),
    ("use_kitchen_attention", "it replaces attention"),
    ("flash_decode", "it replaces attention"),
    ("hybrid_context_parallel", "attention over CP ranks is not bridged yet"),
    ("attention_output_gate", "no program serves it here"),
    ("qk_l2_norm", "no program serves it here"),
    ("qk_clip", "it changes weights between forward and update"),
    ("apply_query_key_layer_scaling", "scores are scaled once, in fp32"),
    ("softmax_scale", "the scale is head_dim ** -0.5"),
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

_MOE_OFF = (
    ("moe_aux_loss_coeff", "our router adds no auxiliary loss"),
    ("moe_z_loss_coeff", "our router adds no auxiliary loss"),
    ("moe_input_jitter_eps", "the engine's router has none"),
    ("moe_router_enable_expert_bias", "no program serves it here"),
    ("moe_router_force_load_balancing", "it replaces the logits"),
    ("moe_router_force_biased", "it replaces the logits"),
    ("moe_enable_routing_replay", "both sides route by themselves, to the same experts"),
    ("moe_token_dropping", "no token is dropped"),
    ("moe_expert_capacity_factor", "no token is dropped"),
    ("moe_expert_rank_capacity_factor", "no token is dropped"),
    ("moe_shared_expert_intermediate_size", "no program serves it here"),
    ("moe_pad_expert_input_to_capacity", "padding is never computed"),
    ("moe_router_padding_for_quantization", "padding is never computed"),
    ("moe_router_padding_for_fp8", "padding is never computed"),
    ("moe_router_topk_limited_devices", "experts are chosen by score alone"),
    ("moe_latent_size", "no program serves it here"),
    ("moe_apply_probs_on_input", "weights multiply after the down projection"),
    ("moe_mlp_glu_interleave_size", "gate and up are stacked"),
    ("moe_single_grouped_weight", "each expert has its own parameters"),
    ("overlap_moe_expert_parallel_comm", "nothing is exchanged between ranks"),
    ("overlap_dispatch_backward_with_experts_wgrad", "nothing is exchanged between ranks"),
)
_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")


def moe_pattern(config: TransformerConfig) -> list[bool]:
    """Return for each layer whether it has experts, as megatron-core reads `moe_layer_freq`."""
    if not config.num_moe_experts:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(has_experts) for has_experts in frequency]


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
    if config.softmax_type != "vanilla":
        found.append(f"softmax_type={config.softmax_type!r}: no program computes an attention sink")
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none"):
        found.append(f"cuda_graph_impl={config.cuda_graph_impl!r}: not tried; set it to 'none'")
    if config.num_moe_experts:
        found += _moe_violations(config)
    selective = config.recompute_granularity == "selective"
    if selective and "core_attn" in (config.recompute_modules or ()):
        found.append("recompute_modules names core_attn: our attention keeps no scores; drop it")
    return found


def _moe_violations(config: TransformerConfig) -> list[str]:
    found = []
    for name, why in _MOE_OFF:
        value = getattr(config, name, None)
        if any(value) if isinstance(value, list | tuple) else value:
            found.append(f"{name}={value}: {why}")
    kinds = config.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in _BALANCING:
            found.append(f"moe_router_load_balancing_type={kind!r}: it chooses other experts")
    if config.moe_router_dtype == "fp64":
        found.append("moe_router_dtype='fp64': logits are fp32, as in the engine; use 'fp32'")
    if len(moe_pattern(config)) != config.num_layers:
        found.append(f"moe_layer_freq={config.moe_layer_freq}: it must name {config.num_layers}")
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
        ("num_moe_experts", config.num_moe_experts or 0, dict(facts.moe).get("num_experts", 0)),
    )
    if config.window_size is not None:
        # Keys to the left; Hugging Face counts the query itself, too, and is what we read.
        left = None if config.window_size[0] < 0 else config.window_size[0]
        window = None if facts.sliding_window is None else facts.sliding_window - 1
        pairs += (("window_size", left, window),)
    if facts.moe and config.num_moe_experts:
        pairs += _moe_pairs(config, facts)
    return [
        f"{name}={ours}, but the Hugging Face configuration says {theirs}"
        for name, ours, theirs in pairs
        if ours != theirs
    ]


def _moe_pairs(config: TransformerConfig, facts: ModelFacts) -> tuple[tuple[str, Any, Any], ...]:
    theirs = dict(facts.moe)
    layers = [index for index, has_experts in enumerate(moe_pattern(config)) if has_experts]
    return (
        ("moe_layer_freq", layers, sorted(moe_layers(facts))),
        ("moe_ffn_hidden_size", config.moe_ffn_hidden_size, theirs["intermediate_size"]),
        ("moe_router_topk", config.moe_router_topk, theirs["top_k"]),
        ("moe_router_score_function", config.moe_router_score_function, theirs["scoring"]),
        # Over all and then divided by the chosen ones' sum = over the chosen logits alone.
        ("moe_router_pre_softmax", bool(config.moe_router_pre_softmax), not theirs["renormalize"]),
        (
            "moe_router_topk_scaling_factor",
            float_bits(config.moe_router_topk_scaling_factor or 1.0),
            theirs["scale"],
        ),
        ("moe_router_num_groups", config.moe_router_num_groups or 1, theirs["num_groups"]),
        ("moe_router_group_topk", config.moe_router_group_topk or 1, theirs["top_groups"]),
    )
