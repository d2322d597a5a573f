"""Typed engine configurations: naming one of them as `_target_` selects our engine."""

from __future__ import annotations

import dataclasses

from consistent_kernels.errors import ConfigurationError

try:
    from verl.workers.config import FSDPEngineConfig, McoreEngineConfig
except ModuleNotFoundError as error:  # an extra, so the message says which
    raise ModuleNotFoundError(
        f"{error}; verl is an extra of this project: pip install vllm-consistent[verl]"
    ) from error


@dataclasses.dataclass
class ConsistentFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDP2 engine configuration; building one activates our engine in this process.

    `actor_rollout_ref.actor.fsdp_config._target_` (and `ref.fsdp_config._target_`) name this class.
    verl builds the configuration in every process that trains, before it asks its registry for an
    engine.

    Args:
        deterministic_gradients: whether training steps use PyTorch's deterministic algorithms, so
            that gradients are equal run to run; on CUDA start with CUBLAS_WORKSPACE_CONFIG=:4096:8.
        program: "triton" takes our own kernels alone, None the fastest; the engine's workers must
            be told the same with VLLM_CONSISTENT_PROGRAM.

    Raises:
        ConfigurationError: another strategy than fsdp2.
    """

    strategy: str = "fsdp2"
    deterministic_gradients: bool = False
    program: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy != "fsdp2":
            raise ConfigurationError(
                [f"strategy={self.strategy!r} is not supported; use 'fsdp2'"], "fsdp_config"
            )
        from train_bridge.verl.registry import activate

        activate("fsdp2")


@dataclasses.dataclass
class ConsistentMcoreEngineConfig(McoreEngineConfig):
    """verl's Megatron engine configuration; building one activates our engine in this process.

    `actor_rollout_ref.actor.megatron._target_` (and `ref.megatron._target_`) name this class.

    Args:
        deterministic_gradients, program: as in `ConsistentFSDPEngineConfig`.
    """

    deterministic_gradients: bool = False
    program: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        from train_bridge.verl.registry import activate

        activate("megatron")
