"""The configuration hook: resolves the contract and refuses, before any worker starts.

vLLM calls `MODELS_CONFIG_MAP[architecture].verify_and_update_config` first thing when it builds a
VllmConfig (vllm/config/vllm.py: try_verify_and_update_config). Each known architecture gets a class
that runs vLLM's own hook and then ours, so an unknown architecture is refused there too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from consistent_kernels.errors import ConfigurationError, MissingBinaryError, UnsupportedError
from consistent_kernels.model_facts import ARCHITECTURES, model_facts
from consistent_kernels.resolve import resolve_contract
from consistent_kernels.rotary import RopeParameters
from vllm_consistent import contracts, env, patches
from vllm_consistent.capture_sizes import capture_prompts
from vllm_consistent.refusals import EXTENSION, WORKERS, violations

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_DEVICES = tuple(WORKERS)


def install() -> None:
    """Chain our hook behind vLLM's for every architecture that vLLM knows."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in {*ModelRegistry.get_supported_archs(), *MODELS_CONFIG_MAP, *ARCHITECTURES}:
        MODELS_CONFIG_MAP[architecture] = _chained(MODELS_CONFIG_MAP.get(architecture))


def _chained(inner: type | None) -> type:
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    base: Any = inner or VerifyAndUpdateConfig
    if getattr(base, "is_consistent", False):
        return base

    class ChainedConfig(base):
        is_consistent = True

        @classmethod
        def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
            base.verify_and_update_config(vllm_config)
            prepare(vllm_config)

    return ChainedConfig


def prepare(vllm_config: VllmConfig) -> None:
    """Refuse what cannot be served, attach the contract, select worker, backend and eager mode.

    On CPU `enforce_eager` is set: Inductor would fuse across our ops and change bits, and there are
    no graphs to gain.

    Raises:
        ConfigurationError: every violation at once.
    """
    from vllm.platforms import current_platform

    device_type = current_platform.device_type
    if device_type not in _DEVICES:
        raise ConfigurationError(
            [f"device {device_type!r} is not supported; use one of {_DEVICES}"], "engine"
        )
    found = violations(vllm_config, device_type)
    contract = None
    model = vllm_config.model_config
    try:
        dtype = str(model.dtype).removeprefix("torch.")
        facts = model_facts(model.hf_text_config, dtype, architecture=model.architecture)
        contract = resolve_contract(facts, device_type, only=env.program())
        found.extend(_positions(model))
    except ConfigurationError as error:
        found.extend(error.violations)
    except (UnsupportedError, MissingBinaryError) as error:
        found.append(str(error))
    if found or contract is None:
        raise ConfigurationError(found, f"engine configuration for {model.model}")
    contracts.attach(vllm_config, contract)
    patches.apply_requests()
    _select(vllm_config, device_type)


def _positions(model: Any) -> list[str]:
    # vLLM lets VLLM_ALLOW_LONG_MAX_MODEL_LEN go beyond the rotary table; the trainer never does.
    rows = RopeParameters.from_hf_config(model.hf_text_config).max_position
    if model.max_model_len <= rows:
        return []
    return [
        f"max_model_len={model.max_model_len} lies beyond the model's {rows} positions; lower it, "
        "or set rope scaling in config.json, which both sides read"
    ]


def _select(vllm_config: VllmConfig, device_type: str) -> None:
    parallel = vllm_config.parallel_config
    parallel.worker_cls = WORKERS[device_type]
    parallel.worker_extension_cls = parallel.worker_extension_cls or EXTENSION
    if device_type == "cpu":
        vllm_config.model_config.enforce_eager = True
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
    capture_prompts(vllm_config)
