"""Rules that look at more than one key, or at a key's range."""

from __future__ import annotations

from collections.abc import Iterator

from consistent_kernels.protocol.temperature import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    is_shared_temperature,
)
from train_bridge.verl.preflight.view import (
    SECTIONS,
    View,
    Violation,
    is_count,
    is_integer,
    same,
)

EXTENSION = "vllm_consistent.integrations.verl.ConsistentColocateWorkerExtension"
ENGINE_CONFIGS = {
    "fsdp2": "train_bridge.verl.engine_config.ConsistentFSDPEngineConfig",
    "megatron": "train_bridge.verl.engine_config.ConsistentMcoreEngineConfig",
}
_GROUPS = {"fsdp2": "dp", "megatron": "megatron"}
_CONFIGS = {"dp": "true_on_policy_grpo_fsdp", "megatron": "true_on_policy_grpo_megatron"}
SWITCH = "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CONSISTENT"
PROGRAM = f"{SWITCH}_PROGRAM"
_ROLLOUT = "actor_rollout_ref.rollout"
_HARMLESS_OVERRIDES = ("attn_implementation",)
_RECOMPUTATION = (
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
)
_HARMLESS_MCORE = (*_RECOMPUTATION, "attention_backend")
_PROGRAMS = ("fastest", "triton")
_SWITCHES = ("deterministic_gradients",)
_MCORE_OPTIMIZERS = ("adam", "sgd")


def violations(view: View) -> Iterator[Violation]:
    """Yield every broken relation."""
    rules = (
        _one_update,
        _samples,
        _temperature,
        _greedy_baseline,
        _seed,
        _lengths,
        _engine,
        _mcore,
        _program,
        _switches,
        _plugin,
        _model_overrides,
    )
    for rule in rules:
        yield from rule(view)


def _one_update(view: View) -> Iterator[Violation]:
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    mini, batch = view.value(key), view.value("data.train_batch_size")
    if not is_count(batch):
        yield Violation(
            "data.train_batch_size", batch, "prompts of one step", "an integer of at least 1"
        )
    elif not is_count(mini) or mini != batch:
        yield Violation(
            key,
            mini,
            f"data.train_batch_size={batch} makes more than one update of a rollout",
            f"{batch}",
        )
    generated = view.get("data.gen_batch_size", batch)
    one_by_one = view.get("algorithm.filter_groups.enable") or view.get(
        "trainer.v1.sampler.sync_refill_failed_groups"
    )
    if generated != batch and not (one_by_one and same(generated, 1)):
        yield Violation(
            "data.gen_batch_size",
            generated,
            "prompts of one step would be sampled in parts",
            "null",
        )


def _samples(view: View) -> Iterator[Violation]:
    key = f"{_ROLLOUT}.n"
    value = view.value(key, 1)
    if not is_count(value):
        yield Violation(key, value, "samples of one prompt", "an integer of at least 1")


def _temperature(view: View) -> Iterator[Violation]:
    key = f"{_ROLLOUT}.temperature"
    value = view.value(key, 1.0)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and value != 0 and is_shared_temperature(value)):
        yield Violation(
            key,
            value,
            "log-probs are divided by it on both sides; vLLM raises or refuses others",
            f"a number from {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}",
        )


def _greedy_baseline(view: View) -> Iterator[Violation]:
    key = "algorithm.adv_estimator"
    if str(view.get(key, "")).lower() == "remax":
        yield Violation(
            key,
            "remax",
            "its greedy baseline is sampled at temperature 0, and one temperature scores a step",
            "grpo",
        )


def _seed(view: View) -> Iterator[Violation]:
    key = f"{_ROLLOUT}.seed"
    value = view.value(key, 42)
    if not is_integer(value):
        yield Violation(key, value, "a capture could not name the sampling state", "an integer")


def _lengths(view: View) -> Iterator[Violation]:
    for key in ("data.max_prompt_length", "data.max_response_length"):
        value = view.value(key, 1)
        if not is_count(value):
            yield Violation(key, value, "it bounds a sequence", "an integer of at least 1")
    key = f"{_ROLLOUT}.max_model_len"
    limit = view.get(key)
    if limit is not None and not is_integer(limit):
        yield Violation(key, limit, "it bounds a sequence", "an integer, or null")
        return
    longest = view.longest_sequence
    if limit is not None and limit < longest:
        yield Violation(
            key, limit, "prompts and responses do not fit, so responses are cut", f"{longest}"
        )


def _engine(view: View) -> Iterator[Violation]:
    strategy = view.strategy
    if strategy not in SECTIONS:
        yield Violation(
            "actor_rollout_ref.actor.strategy",
            strategy,
            "our engine does not exist for it, so verl's would run",
            "'fsdp2' or 'megatron'",
        )
        return
    group = view.get("model_engine", _GROUPS[strategy])
    if group != _GROUPS[strategy]:
        yield Violation(
            "model_engine",
            group,
            f"verl's configuration groups of another engine than {strategy!r}",
            f"--config-name {_CONFIGS[group]}" if group in _CONFIGS else _GROUPS[strategy],
        )
        return
    for part in _parts(view):
        for key in (
            f"actor_rollout_ref.{part}.strategy",
            f"actor_rollout_ref.{part}.{view.section}.strategy",
        ):
            given = view.value(key, strategy)
            if given != strategy:
                yield Violation(
                    key, given, "verl's own engine would compute log-probs", repr(strategy)
                )
        key = f"actor_rollout_ref.{part}.{view.section}._target_"
        target = str(view.get(key, ""))
        if target != ENGINE_CONFIGS[strategy]:
            yield Violation(
                key, target, "verl's own engine would compute log-probs", ENGINE_CONFIGS[strategy]
            )


def _parts(view: View) -> tuple[str, ...]:
    return ("actor", "ref") if view.uses_reference else ("actor",)


def _mcore(view: View) -> Iterator[Violation]:
    if view.strategy != "megatron":
        return
    for part in _parts(view):
        section = f"actor_rollout_ref.{part}.megatron"
        for name, value in view.mapping(f"{section}.override_transformer_config").items():
            if name not in _HARMLESS_MCORE and value is not None:
                yield Violation(
                    f"{section}.override_transformer_config.{name}",
                    value,
                    "it changes the trainer's model alone",
                    "the checkpoint's config.json, which both sides read",
                )
        selective = f"{section}.override_transformer_config"
        modules = view.get(f"{selective}.recompute_modules", ())
        if view.get(f"{selective}.recompute_granularity") == "selective" and "core_attn" in modules:
            yield Violation(
                f"{selective}.recompute_modules",
                list(modules),
                "our attention keeps no scores that could be recomputed",
                "the list without core_attn",
            )
        model = view.mapping(f"{section}.override_mcore_model_config")
        if model:
            yield Violation(
                f"{section}.override_mcore_model_config", model, "our model does not read it", "{}"
            )
    key = "actor_rollout_ref.actor.optim.optimizer"
    optimizer = str(view.get(key, _MCORE_OPTIMIZERS[0])).lower()
    if optimizer not in _MCORE_OPTIMIZERS:
        yield Violation(key, optimizer, "its layout of weights is not tested", "adam")


def _program(view: View) -> Iterator[Violation]:
    engine = str(view.get(PROGRAM, "") or "fastest").lower()
    if engine not in _PROGRAMS:
        yield Violation(PROGRAM, engine, "there is no such program", " or ".join(_PROGRAMS))
        return
    for part in _parts(view):
        key = f"actor_rollout_ref.{part}.{view.section}.program"
        trainer = str(view.get(key, "fastest"))
        if trainer != engine:
            wanted = "null" if engine == "fastest" else engine
            yield Violation(
                key, trainer, f"{PROGRAM}={engine} gives the engine other kernels", wanted
            )


def _switches(view: View) -> Iterator[Violation]:
    for part in _parts(view):
        for name in _SWITCHES:
            key = f"actor_rollout_ref.{part}.{view.section}.{name}"
            value = view.value(key, False)
            if not isinstance(value, bool):
                yield Violation(key, value, "it is on or off", "true or false")


def _plugin(view: View) -> Iterator[Violation]:
    switch = str(view.get(SWITCH, "")).lower()
    if switch not in ("1", "true"):
        yield Violation(SWITCH, switch, "vLLM would run without the plugin", '"1"')
    key = f"{_ROLLOUT}.engine_kwargs.vllm.worker_extension_cls"
    extension = view.get(key, "")
    if extension != EXTENSION:
        yield Violation(key, extension, "weights would be served without a receipt", EXTENSION)
    key = f"{_ROLLOUT}.engine_kwargs.vllm.worker_cls"
    worker = view.get(key, "auto")
    if worker != "auto":
        yield Violation(key, worker, "the plugin selects the worker", "auto")


def _model_overrides(view: View) -> Iterator[Violation]:
    section = "actor_rollout_ref.model.override_config"
    given = view.mapping(section)
    # verl reads these alone where they are given.
    inner = given.pop("model_config", None)
    overrides = given | {f"model_config.{name}": value for name, value in (inner or {}).items()}
    for name, value in overrides.items():
        if name.rsplit(".", 1)[-1] not in _HARMLESS_OVERRIDES:
            yield Violation(
                f"{section}.{name}",
                value,
                "it changes the trainer's model alone (positions, rope, sizes)",
                "the checkpoint's config.json, which both sides read",
            )
    path = view.get("actor_rollout_ref.model.path")
    for name in ("hf_config_path", "tokenizer_path"):
        key = f"actor_rollout_ref.model.{name}"
        other = view.get(key, path)
        if other != path:
            yield Violation(key, other, "the engine reads model.path alone", f"{path}")
