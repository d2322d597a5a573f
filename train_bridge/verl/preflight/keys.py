"""Keys with a fixed value: one line a rule."""

from __future__ import annotations

from collections.abc import Iterator

from train_bridge.verl.preflight.view import Fixed, View, Violation

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_MODEL = "actor_rollout_ref.model"

_ORDER = "its collectives add in an order that is not pinned"
_REPLACES = "it replaces the forward that is shared with the engine"
_ADAPTER = "adapters run kernels outside the contract"
_STALE = "samples would come from other weights than those that score them"

TOPOLOGY = (
    Fixed(f"{_ROLLOUT}.tensor_model_parallel_size", (1,), _ORDER, required=True),
    Fixed(f"{_ROLLOUT}.pipeline_model_parallel_size", (1,), "not tested"),
    Fixed(f"{_ROLLOUT}.data_parallel_size", (1,), "one engine a replica is what is verified"),
    Fixed(f"{_ROLLOUT}.expert_parallel_size", (1,), "not tested"),
    Fixed(f"{_ACTOR}.ulysses_sequence_parallel_size", (1,), "it cuts sequences inside attention"),
    Fixed(f"{_REF}.ulysses_sequence_parallel_size", (1,), "it cuts sequences inside attention"),
)

UPDATES = (
    Fixed("trainer.use_v1", (True,), "verl's legacy trainer has no hook for the comparison"),
    Fixed(
        "trainer.v1.trainer_mode",
        ("true_on_policy",),
        f"nothing is compared, or {_STALE}",
        required=True,
    ),
    Fixed(f"{_ACTOR}.ppo_epochs", (1,), "after the first update the rollout's policy is gone"),
    Fixed(
        "algorithm.rollout_correction.bypass_mode",
        (False,),
        "old_log_probs would be copied from the rollout, so that a mismatch cannot be seen",
    ),
    Fixed("actor_rollout_ref.hybrid_engine", (True,), _STALE),
    Fixed(f"{_ROLLOUT}.nnodes", (0,), f"standalone replicas: {_STALE}"),
    Fixed(
        f"{_ROLLOUT}.over_sample_rate", (0, 0.0), "surplus samples are aborted: partial rollouts"
    ),
    Fixed("trainer.v1.sampler.custom_sampler.path", ("",), f"it may pick old samples: {_STALE}"),
    Fixed(f"{_ROLLOUT}.disaggregation.enabled", (False,), "the cache may come from other weights"),
    Fixed("skip.rollout.enable", (False,), f"recorded rollouts: {_STALE}"),
    Fixed("skip.rollout_tq.enable", (False,), f"recorded rollouts: {_STALE}"),
    Fixed("skip.async_rollout.enable", (False,), f"recorded rollouts: {_STALE}"),
    Fixed(f"{_ROLLOUT}.checkpoint_engine.backend", ("naive",), "other transports give no receipt"),
    Fixed(f"{_ROLLOUT}.checkpoint_engine.custom_backend_module", ("",), "it gives no receipt"),
    Fixed(f"{_ROLLOUT}.checkpoint_manager_class", ("",), "other transports give no receipt"),
)

ADAPTERS = (
    Fixed(f"{_MODEL}.lora_rank", (0,), _ADAPTER),
    Fixed(f"{_MODEL}.lora.rank", (0,), _ADAPTER),
    Fixed(f"{_MODEL}.lora.adapter_path", ("",), _ADAPTER),
    Fixed(f"{_MODEL}.lora_adapter_path", ("",), _ADAPTER),
    Fixed(f"{_MODEL}.mtp.enable", (False,), "its heads are not in the contract"),
    Fixed("distillation.enabled", (False,), "its top-k losses need logits that never exist"),
    Fixed(f"{_ACTOR}.calculate_sum_pi_squared", (False,), "it needs logits that never exist"),
    Fixed(f"{_ROLLOUT}.enable_rollout_routing_replay", (False,), "both sides route by themselves"),
)

NUMERICS = (
    Fixed(f"{_ROLLOUT}.dtype", ("bfloat16",), "the contract is for bfloat16"),
    Fixed(f"{_ROLLOUT}.qat.enable", (False,), _REPLACES),
    Fixed(f"{_ACTOR}.qat.enable", (False,), _REPLACES),
    Fixed(f"{_ROLLOUT}.quantization", ("",), "no contract covers quantized weights here yet"),
    Fixed(f"{_ROLLOUT}.quantization_config_file", ("",), "it changes the engine's weights alone"),
    Fixed(f"{_MODEL}.use_fused_kernels", (False,), _REPLACES),
    Fixed(f"{_ACTOR}.use_fused_kernels", (False,), _REPLACES),
    Fixed(f"{_MODEL}.use_liger", (False,), _REPLACES),
    Fixed(f"{_MODEL}.tiled_mlp.enabled", (False,), _REPLACES),
    Fixed(f"{_ACTOR}.use_prefix_grouper", (False,), _REPLACES),
    Fixed(f"{_ACTOR}.pad_to_length", (False,), "padding is never computed"),
    Fixed(
        f"{_ROLLOUT}.full_determinism",
        (False,),
        "it sets VLLM_BATCH_INVARIANT, which replaces operators under our kernels",
    ),
)

SAMPLING = (
    Fixed(f"{_ROLLOUT}.top_p", (1, 1.0), "the trainer scores the whole distribution"),
    Fixed(f"{_ROLLOUT}.top_k", (-1, 0), "the trainer scores the whole distribution"),
    Fixed(f"{_ROLLOUT}.repetition_penalty", (1, 1.0), "the trainer does not mirror it"),
    Fixed(f"{_ROLLOUT}.val_kwargs.top_p", (1, 1.0), "the plugin refuses such requests"),
    Fixed(f"{_ROLLOUT}.val_kwargs.top_k", (-1, 0), "the plugin refuses such requests"),
    Fixed(
        f"{_ROLLOUT}.calculate_log_probs",
        (True,),
        "there would be nothing to compare",
        required=True,
    ),
    Fixed(
        f"{_ROLLOUT}.logprobs_mode",
        ("processed_logprobs", "raw_logprobs"),
        "log-probs, not logits, are compared",
    ),
    Fixed(f"{_ROLLOUT}.name", ("vllm",), "the plugin is vLLM's", required=True),
    Fixed(f"{_ROLLOUT}.mode", ("async",), "verl has no other mode any more"),
    Fixed("trainer.device", ("cuda", "cpu"), "there are kernels for these alone"),
    Fixed(
        f"{_ROLLOUT}.multi_turn.tokenization_sanity_check_mode",
        ("strict", "ignore_strippable"),
        "prompt and response would meet at another token than in the engine",
    ),
)


def _fsdp(section: str) -> tuple[Fixed, ...]:
    return (
        Fixed(
            f"{section}.ulysses_sequence_parallel_size", (1,), "it cuts sequences inside attention"
        ),
        Fixed(f"{section}.dtype", ("bfloat16",), "the contract is for bfloat16"),
        Fixed(
            f"{section}.model_dtype",
            ("fp32", "float32", "bf16", "bfloat16", None),
            "masters must hold what rounds to the engine's weights",
        ),
        Fixed(
            f"{section}.mixed_precision.param_dtype",
            ("bf16", "bfloat16"),
            "weights would be rounded otherwise than in the engine",
        ),
        Fixed(f"{section}.qat.enable", (False,), _REPLACES),
        Fixed(f"{section}.pad_to_length", (False,), "padding is never computed"),
    )


def _megatron(section: str) -> tuple[Fixed, ...]:
    return (
        Fixed(f"{section}.tensor_model_parallel_size", (1,), _ORDER),
        Fixed(f"{section}.expert_tensor_parallel_size", (1, None), _ORDER),
        Fixed(f"{section}.pipeline_model_parallel_size", (1,), "stages are not bridged"),
        Fixed(
            f"{section}.virtual_pipeline_model_parallel_size", (1, None), "stages are not bridged"
        ),
        Fixed(f"{section}.context_parallel_size", (1,), "it cuts sequences inside attention"),
        Fixed(
            f"{section}.dynamic_context_parallel", (False,), "it cuts sequences inside attention"
        ),
        Fixed(f"{section}.expert_model_parallel_size", (1,), "its dispatcher adds experts by id"),
        Fixed(f"{section}.use_megatron_fsdp", (False,), "our modules are not sharded by it"),
        Fixed(f"{section}.use_mbridge", (True,), "verl's engine refuses to start otherwise"),
        Fixed(f"{section}.dtype", ("bfloat16",), "the contract is for bfloat16"),
        Fixed(f"{section}.qat.enable", (False,), _REPLACES),
        Fixed(f"{section}.pad_to_length", (False,), "padding is never computed"),
        Fixed(f"{section}.router_replay.mode", ("disabled",), "both sides route by themselves"),
    )


ENGINES = (
    Fixed(f"{_ACTOR}.fsdp_config.forward_only", (False,), "nothing would be trained"),
    Fixed(f"{_ACTOR}.megatron.forward_only", (False,), "nothing would be trained"),
    *_fsdp(f"{_ACTOR}.fsdp_config"),
    *_fsdp(f"{_REF}.fsdp_config"),
    *_megatron(f"{_ACTOR}.megatron"),
    *_megatron(f"{_REF}.megatron"),
)

ALL = (*TOPOLOGY, *UPDATES, *ADAPTERS, *NUMERICS, *SAMPLING, *ENGINES)


def violations(view: View) -> Iterator[Violation]:
    """Yield every key that has another value than it may have."""
    for rule in ALL:
        yield from rule.violations(view)
