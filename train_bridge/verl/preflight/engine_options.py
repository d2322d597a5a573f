"""Options of `vllm serve` under `rollout.engine_kwargs.vllm`, however they are spelled.

verl hands each entry to vLLM's parser as `--NAME VALUE`. The parser takes dashes for underscores,
beginnings of names, and `no-` before a switch: a rule looks at every entry that means its option.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from train_bridge.verl.preflight.view import Fixed, View, Violation, is_count, same

ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"

_ORDER = "its collectives add in an order that is not pinned"
_PARTIAL = "it merges partial attention in another order"
_ALONE = "it changes the engine's model alone"
_OTHER_WEIGHTS = "the cache may come from other weights"
_OFFLOAD = "offloaded weights cannot be rebuilt in place"
_QUANTIZED = "no contract covers quantized weights here yet"
_SPECULATION = "accepted tokens are scored by another model"
_CONTRACT = "the contract names the kernels"
_READS = "engine and trainer would read other files"
_HEADS = "the engine would not generate from the model's head"

_OPTIONS = (
    ("pipeline_parallel_size", (1,), "not tested"),
    ("data_parallel_size", (1,), "one engine a replica is what is verified"),
    ("tensor_parallel_size", (1,), _ORDER),
    ("decode_context_parallel_size", (1,), _PARTIAL),
    ("prefill_context_parallel_size", (1,), _PARTIAL),
    ("enable_dbo", (False,), "micro-batches would overlap in other shapes"),
    ("ubatch_size", (0,), "micro-batches would overlap in other shapes"),
    ("enable_eplb", (False,), "it moves experts between ranks and copies them"),
    ("weight_transfer_config", ("",), "it gives no receipt"),
    ("kv_transfer_config", ("",), _OTHER_WEIGHTS),
    ("ec_transfer_config", ("",), _OTHER_WEIGHTS),
    ("kv_offloading_size", ("",), "offloaded pages outlive a weight update"),
    ("cpu_offload_gb", (0,), _OFFLOAD),
    ("offload_group_size", (0,), _OFFLOAD),
    ("enable_lora", (False,), "adapters run kernels outside the contract"),
    ("speculative_config", ("",), _SPECULATION),
    ("spec_method", ("",), _SPECULATION),
    ("spec_model", ("",), _SPECULATION),
    ("spec_tokens", ("",), _SPECULATION),
    ("dtype", ("bfloat16",), "the contract is for bfloat16"),
    ("quantization", ("",), _QUANTIZED),
    ("quantization_config", ("",), _QUANTIZED),
    ("kv_cache_dtype", ("auto", "bfloat16"), "the trainer keeps bf16 keys"),
    ("kv_sharing_fast_prefill", (False,), "it leaves out part of the prompt's forward"),
    ("disable_cascade_attn", (True,), _PARTIAL),
    ("attention_backend", ("CUSTOM", "CPU_ATTN"), "the plugin's own must serve"),
    ("override_attention_dtype", ("",), "the contract is for bfloat16"),
    ("disable_sliding_window", (False,), _ALONE),
    ("moe_backend", ("auto",), _CONTRACT),
    ("model_impl", ("auto", "vllm"), "the plugin's layers are those of vLLM's models"),
    ("model_class_overrides", ("",), "the plugin's layers are those of vLLM's models"),
    (
        "logprobs_mode",
        ("processed_logprobs", "raw_logprobs"),
        "log-probs, not logits, are compared",
    ),
    ("logits_processors", ("",), "the trainer does not mirror them"),
    ("enable_prompt_embeds", (False,), "the trainer sees token ids only"),
    ("enable_return_routed_experts", (False,), "both sides route by themselves"),
    ("diffusion_config", ("",), _HEADS),
    ("runner", ("auto", "generate"), _HEADS),
    ("convert", ("auto", "none"), _HEADS),
    *((name, ("",), _ALONE) for name in ("hf_overrides", "rope_scaling", "rope_theta")),
    ("rope_parameters", ("",), _ALONE),
    *((name, ("",), _READS) for name in ("tokenizer", "hf_config_path", "revision")),
    *((name, ("",), _READS) for name in ("code_revision", "tokenizer_revision")),
    ("config", ("",), "vLLM would read options from a file that is not checked here"),
)

OPTIONS = tuple(Fixed(f"{ENGINE}.{name}", allowed, why) for name, allowed, why in _OPTIONS)
"""Options with a fixed value; an absent or null one is not handed to vLLM."""

_NESTED = {
    "attention_config": {
        "backend": (("CUSTOM", "CPU_ATTN"), "the plugin's own must serve"),
        "use_non_causal": ((False,), "attention is causal"),
    },
    "kernel_config": {"moe_backend": (("auto",), _CONTRACT)},
}
_NAMES = {option.key.rsplit(".", 1)[1] for option in OPTIONS} | set(_NESTED)
_LONGER = {"block_size", "max_model_len", "additional_config"}
# An option of vLLM whose whole name begins another's means itself.
_WHOLE = _NAMES | _LONGER | {"model"}


def violations(view: View) -> Iterator[Violation]:
    """Yield every option that has another value than it may have."""
    for name, value, key in _entries(view):
        for option in OPTIONS:
            if option.key == f"{ENGINE}.{name}":
                yield from _judged(option.allowed, option.why, key, value)
        for inner, (allowed, why) in _NESTED.get(name, {}).items():
            held = _mapping(value).get(inner)
            if held is not None:
                yield from _judged(allowed, why, f"{key}.{inner}", held)
        if name == "block_size" and not (isinstance(value, int) and value % 16 == 0):
            yield Violation(key, value, "pages hold whole tiles of 16 keys", "a multiple of 16")
        if name == "max_model_len":
            yield from _length(view, key, value)
        if name == "additional_config" and not isinstance(value, dict):
            yield Violation(key, value, "the contract's digest is written into it", "a mapping")


def _judged(allowed: tuple[Any, ...], why: str, key: str, value: Any) -> Iterator[Violation]:
    if value in ({}, []) and allowed[0] == "":
        return
    if not any(same(value, one) for one in allowed):
        yield Violation(key, value, why, "null" if allowed[0] == "" else repr(allowed[0]))


def _length(view: View, key: str, value: Any) -> Iterator[Violation]:
    longest = view.longest_sequence
    if not is_count(value, longest):
        why = "prompts and responses do not fit, so responses are cut"
        yield Violation(key, value, why, f"{longest}, or null")


def _entries(view: View) -> Iterator[tuple[str, Any, str]]:
    """Yield (option's name, value, key as it is spelled) of every entry that is handed to vLLM."""
    for spelled, value in view.mapping(ENGINE).items():
        if value is None:
            continue
        name = str(spelled).replace("-", "_")
        if name.startswith("no_") and isinstance(value, bool):
            name, value = name.removeprefix("no_"), not value
        if name not in _WHOLE:
            meant = sorted(whole for whole in _NAMES | _LONGER if whole.startswith(name))
            if len(meant) == 1:
                name = meant[0]
        yield name, value, f"{ENGINE}.{spelled}"


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    found = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return found if isinstance(found, dict) else {}
