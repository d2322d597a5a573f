"""What an engine may not be configured with while the plugin is on: one line of text a rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_consistent import env

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKERS = {
    "cpu": "vllm_consistent.worker_cpu.ConsistentCPUWorker",
    "cuda": "vllm_consistent.worker_cuda.ConsistentGPUWorker",
}
EXTENSION = "vllm_consistent.worker.ConsistencyWorkerExtension"
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_PAGE_MULTIPLES = {"cpu": 8, "cuda": 16}
_BACKENDS = {"cpu": ("CPU_ATTN",), "cuda": ("CUSTOM",)}


def violations(vllm_config: VllmConfig, device_type: str) -> list[str]:
    """Return every reason why this configuration cannot be served consistently."""
    return [
        *_parallel(vllm_config.parallel_config),
        *_expert_parallel(vllm_config, device_type),
        *_features(vllm_config),
        *_model(vllm_config.model_config),
        *_cache(vllm_config.cache_config, device_type),
        *_classes(vllm_config.parallel_config, device_type),
        *_attention(vllm_config.attention_config, device_type),
        *_environment(device_type),
    ]


def _parallel(parallel: Any) -> Iterator[str]:
    for field, why in (
        ("tensor_parallel_size", "its all-reduce adds in an order that is not pinned yet"),
        ("pipeline_parallel_size", "not tested yet"),
        ("decode_context_parallel_size", "it merges partial attention in another order"),
        ("prefill_context_parallel_size", "it merges partial attention in another order"),
    ):
        size = getattr(parallel, field, 1)
        if size > 1:
            yield f"{field}={size} is not supported ({why}); use 1"
    if parallel.enable_eplb:
        yield "enable_eplb moves experts between ranks and copies them; turn it off"
    if parallel.enable_dbo or parallel.ubatch_size > 0:
        yield "dual-batch overlap (enable_dbo, ubatch_size) is not supported; turn it off"


def _expert_parallel(config: VllmConfig, device_type: str) -> Iterator[str]:
    parallel, model = config.parallel_config, config.model_config
    size = parallel.data_parallel_size
    if size == 1:
        return
    if not (model.is_moe and parallel.enable_expert_parallel):
        yield (
            f"data_parallel_size={size} is supported with enable_expert_parallel and a mixture of "
            "experts; else start one engine per replica"
        )
        return
    if parallel.expert_placement_strategy != "linear":
        yield (
            f"expert_placement_strategy={parallel.expert_placement_strategy!r} is not supported; "
            "use 'linear'"
        )
    if device_type == "cuda" and not model.enforce_eager:
        yield (
            "expert parallelism reads the number of rows for each rank on the host, which no graph "
            "holds; set enforce_eager=True"
        )


def _features(config: VllmConfig) -> Iterator[str]:
    if config.speculative_config is not None:
        yield "speculative decoding is not supported: accepted tokens are scored by another model"
    if config.lora_config is not None:
        yield "LoRA is not supported: its adapters run kernels outside the contract"
    backend = config.kernel_config.moe_backend
    if backend != "auto":
        yield f"moe_backend={backend!r} is not supported: the contract names it; use 'auto'"
    if config.kv_transfer_config is not None or config.ec_transfer_config is not None:
        yield "KV or encoder-cache transfer is not supported: the cache may come from other weights"
    if config.weight_transfer_config is not None:
        yield (
            "weight_transfer_config is not supported: it leaves no receipt; "
            "use update_weights_in_place"
        )
    if getattr(config.diffusion_config, "canvas_length", None) is not None:
        yield "diffusion models are not supported"
    if (
        config.offload_config.uva.cpu_offload_gb
        or config.offload_config.prefetch.offload_group_size
    ):
        yield "weight offloading is not supported: offloaded weights cannot be rebuilt in place"
    if not isinstance(config.additional_config, dict):
        yield "additional_config must be a dict: the contract digest is written into it"


def _model(model: Any) -> Iterator[str]:
    if model.runner_type != "generate":
        yield f"runner {model.runner_type!r} is not supported; use 'generate'"
    # What an "fp8" configuration may say stands in `model_facts`.
    in_file = getattr(model.hf_text_config, "quantization_config", None)
    if model.quantization not in (None, "fp8") or (model.quantization and not in_file):
        yield (
            f"quantization={model.quantization!r} is not supported; serve bfloat16 weights, or a "
            "checkpoint whose config.json has a block-FP8 quantization_config"
        )
    if not model.disable_cascade_attn:
        yield (
            "cascade attention is not supported: it merges a shared prefix in another order; "
            "set disable_cascade_attn=True"
        )
    if model.logprobs_mode not in _LOGPROBS_MODES:
        yield (
            f"logprobs_mode={model.logprobs_mode!r} is not supported; use one of {_LOGPROBS_MODES} "
            "(both return log-probs at the request's temperature)"
        )
    if model.logits_processors:
        yield "custom logits_processors are not supported: the trainer does not mirror them"
    if model.enable_return_routed_experts:
        yield (
            "enable_return_routed_experts is not supported: engine and trainer route alike, so "
            "there is nothing to replay"
        )
    if model.enable_prompt_embeds:
        yield "enable_prompt_embeds is not supported: the trainer sees token ids only"
    if model.model_class_overrides:
        yield "model_class_overrides is not supported: it bypasses the known model classes"
    if model.disable_sliding_window and getattr(model.hf_text_config, "sliding_window", None):
        yield "disable_sliding_window changes what the model computes; leave it off"
    if model.override_attention_dtype is not None:
        yield "override_attention_dtype is not supported; leave it unset"


def _cache(cache: Any, device_type: str) -> Iterator[str]:
    if cache.cache_dtype not in ("auto", "bfloat16"):
        yield f"kv_cache_dtype={cache.cache_dtype!r} is not supported; use 'auto'"
    if cache.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill is not supported; turn it off"
    if cache.kv_offloading_size is not None:
        yield "kv_offloading_size is not supported: offloaded pages outlive a weight update"
    multiple = _PAGE_MULTIPLES[device_type]
    if cache.block_size is not None and cache.block_size % multiple:
        yield f"block_size={cache.block_size} must be a multiple of {multiple}"


def _classes(parallel: Any, device_type: str) -> Iterator[str]:
    ours = WORKERS[device_type]
    if parallel.worker_cls not in ("auto", ours):
        yield f"worker_cls={parallel.worker_cls!r} is not supported; leave it at 'auto' ({ours})"
    extension = parallel.worker_extension_cls
    if extension and extension != EXTENSION and not _extends_ours(extension):
        yield f"worker_extension_cls={extension!r} must derive from {EXTENSION}"


def _extends_ours(extension: str) -> bool:
    # Imported by name: its module may be heavy, and is only needed when somebody set one.
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_consistent.worker import ConsistencyWorkerExtension

    return issubclass(resolve_obj_by_qualname(extension), ConsistencyWorkerExtension)


def _attention(attention: Any, device_type: str) -> Iterator[str]:
    backend = attention.backend
    if backend is not None and backend.name not in _BACKENDS[device_type]:
        expected = " or ".join(_BACKENDS[device_type])
        yield f"attention backend {backend.name} is not supported; leave it unset or use {expected}"
    if attention.use_non_causal:
        yield "use_non_causal is not supported: attention is causal"


def _environment(device_type: str) -> Iterator[str]:
    if env.batch_invariant_requested():
        yield (
            "VLLM_BATCH_INVARIANT=1 replaces PyTorch operators under our kernels; unset it "
            f"(the plugin gives batch invariance itself on {device_type})"
        )
    if device_type == "cpu" and env.v2_runner_forced():
        yield "VLLM_USE_V2_MODEL_RUNNER=1 is not supported on CPU; unset it (V1 serves there)"
    if env.flashinfer_sampler_requested():
        yield "VLLM_USE_FLASHINFER_SAMPLER=1 is not supported: it changes log-probs; unset it"
