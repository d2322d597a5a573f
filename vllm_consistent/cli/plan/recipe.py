"""The numbers of a recipe that decide memory, out of verl's composed configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from consistent_kernels.errors import ConfigurationError, InvalidInputError, UnsupportedError
from vllm_consistent.cli.doctor.compose import shipped

_COUNTS = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
)
_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One colocated run: every GPU trains, and holds one rollout replica.

    Attributes:
        model: folder or name.
        gpus: of the run.
        shard_gpus: N, that share one copy of the masters (FSDP2) or of the optimizer (Megatron,
            which keeps whole weights and gradients on each).
        master_bytes, reference_bytes: bytes a parameter of what the forward starts from.
        reference: a reference policy is kept.
        param_offload, optimizer_offload, reference_offload: to host memory during rollout.
        gradient_checkpointing: layers run again in the backward.
        micro_batch_tokens: T.
        prompts, samples: of a step.
        max_prompt, max_response, max_model_len: tokens.
        max_num_seqs, max_num_batched_tokens, gpu_memory_utilization: the engine's.
        megatron: the training engine is verl's Megatron one.
    """

    model: str
    gpus: int
    shard_gpus: int
    master_bytes: int
    reference: bool
    reference_bytes: int
    param_offload: bool
    optimizer_offload: bool
    reference_offload: bool
    gradient_checkpointing: bool
    micro_batch_tokens: int
    prompts: int
    samples: int
    max_prompt: int
    max_response: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    megatron: bool = False

    @property
    def longest_sequence(self) -> int:
        """Prompt and response, in tokens."""
        return self.max_prompt + self.max_response

    @property
    def sequences_per_replica(self) -> int:
        """Sequences that a replica samples in a step, rounded up."""
        return -(-self.prompts * self.samples // self.gpus)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step when every sequence is as long as it may be."""
        return self.prompts * self.samples * self.longest_sequence


def compose_recipe(config: str, overrides: list[str], command: str = "plan") -> Any:
    """Compose a recipe with hydra.

    Args:
        config: a recipe's folder (holding <name>.yaml), a yaml file, or the name of a shipped
            configuration.
        overrides: KEY=VALUE, as on verl's command line.
        command: who asks, for the messages.

    Raises:
        InvalidInputError: no such file, or it does not compose.
        UnsupportedError: hydra or verl is not installed.
    """
    try:
        import verl  # noqa: F401  its configuration groups are the base
        from hydra import compose, initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError
    except ImportError as error:
        raise UnsupportedError(
            command, f"this installation ({error})", ("pip install 'vllm-consistent[verl]'",)
        ) from error
    path = Path(config).expanduser()
    file = path / f"{path.resolve().name}.yaml" if path.is_dir() else path
    if not file.exists():
        file = shipped().get(config, file)
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        raise InvalidInputError(
            f"{command}: CONFIG must be a recipe's folder or a yaml file, got {config!r}"
            + (f" without {file.name}" if path.is_dir() else "")
        )
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(file.resolve().parent), version_base=None):
            return compose(file.stem, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeError, OSError) as error:
        raise InvalidInputError(f"{command}: {file} must compose: {error}") from error


def _require_numbers(config: Any) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    violations = []
    for key in _COUNTS:
        try:
            value = OmegaConf.select(config, key)
        except OmegaConfBaseException as error:
            value = f"{type(error).__name__}"
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            violations.append(f"{key} must be an integer of at least 1, got {value!r}")
    if len(violations) == len(_COUNTS):
        raise InvalidInputError(
            f"plan: CONFIG must be a verl configuration (built on ppo_trainer), got one without "
            f"{_COUNTS[0]} and {len(_COUNTS) - 1} other keys"
        )
    if violations:
        raise ConfigurationError(violations, "plan")


def read_recipe(config: Any) -> Recipe:
    """Read verl's configuration (composed, `actor_rollout_ref` and so on).

    Raises:
        ConfigurationError: what this estimate does not cover, all at once.
    """
    _require_numbers(config)
    role, trainer = config.actor_rollout_ref, config.trainer
    actor, rollout = role.actor, role.rollout
    gpus = trainer.nnodes * trainer.n_gpus_per_node
    violations = []
    engine = (
        _megatron(role, gpus) if actor.strategy == "megatron" else _fsdp(role, gpus, violations)
    )
    if rollout.tensor_model_parallel_size != 1:
        size = rollout.tensor_model_parallel_size
        violations.append(f"rollout.tensor_model_parallel_size={size}: set it to 1")
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = actor.ppo_max_token_len_per_gpu
    if not actor.use_dynamic_bsz:
        if actor.ppo_micro_batch_size_per_gpu is None:
            violations.append(
                "actor.ppo_micro_batch_size_per_gpu is unset and actor.use_dynamic_bsz is off"
            )
        tokens = (actor.ppo_micro_batch_size_per_gpu or 1) * longest
    if violations:
        raise ConfigurationError(violations, "plan")
    return Recipe(
        model=role.model.path,
        gpus=gpus,
        reference=bool(actor.use_kl_loss or config.algorithm.use_kl_in_reward),
        micro_batch_tokens=tokens,
        prompts=config.data.train_batch_size,
        samples=rollout.n,
        max_prompt=config.data.max_prompt_length,
        max_response=config.data.max_response_length,
        max_model_len=rollout.max_model_len or longest,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        **engine,
    )


def _fsdp(role: Any, gpus: int, violations: list[str]) -> dict[str, Any]:
    """Return the fields of a Recipe that FSDP's keys decide."""
    actor, fsdp, reference = role.actor, role.actor.fsdp_config, role.ref.fsdp_config
    if actor.strategy not in ("fsdp", "fsdp2"):
        violations.append(f"actor.strategy={actor.strategy}: only FSDP and Megatron are estimated")
    for name, part in (("actor", fsdp), ("ref", reference)):
        if part.model_dtype not in _BYTES:
            known = ", ".join(_BYTES)
            violations.append(f"{name}.fsdp_config.model_dtype={part.model_dtype}: one of {known}")
    shard = gpus if fsdp.fsdp_size in (-1, None) else fsdp.fsdp_size
    if gpus % shard:
        violations.append(f"actor.fsdp_config.fsdp_size={shard} does not divide {gpus} GPUs")
    return {
        "shard_gpus": shard,
        "master_bytes": _BYTES.get(fsdp.model_dtype, 0),
        "reference_bytes": _BYTES.get(reference.model_dtype, 0),
        "param_offload": bool(fsdp.param_offload),
        "optimizer_offload": bool(fsdp.optimizer_offload),
        "reference_offload": bool(reference.param_offload),
        "gradient_checkpointing": bool(role.model.enable_gradient_checkpointing),
    }


def _megatron(role: Any, gpus: int) -> dict[str, Any]:
    """Return the fields of a Recipe that Megatron's keys decide; TP, PP, CP and EP are 1."""
    engine, reference = role.actor.megatron, role.ref.megatron
    return {
        "megatron": True,
        "shard_gpus": gpus if engine.use_distributed_optimizer else 1,
        "master_bytes": _BYTES["bf16"],
        "reference_bytes": _BYTES["bf16"],
        "param_offload": bool(engine.param_offload),
        "optimizer_offload": bool(engine.optimizer_offload),
        "reference_offload": bool(reference.param_offload),
        "gradient_checkpointing": engine.override_transformer_config.recompute_granularity
        == "full",
    }
