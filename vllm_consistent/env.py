"""The only file of this package that reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

from consistent_kernels.errors import ConfigurationError

SWITCH = "VLLM_CONSISTENT"
"""Set to 1 to turn the plugin on; unset, empty or 0 leaves vLLM untouched."""

PROGRAM = "VLLM_CONSISTENT_PROGRAM"
"""On CUDA: unset, empty or fastest for the fastest program; triton for our own kernels alone."""

_ON = ("1", "true")
_OFF = ("", "0", "false")


def enabled() -> bool:
    """Return whether the switch is on.

    Raises:
        ConfigurationError: a value that is neither on nor off; a misspelt switch must not mean off.
    """
    value = os.environ.get(SWITCH, "").strip().lower()
    if value in _ON:
        return True
    if value in _OFF:
        return False
    raise ConfigurationError(
        [f"{SWITCH}={value!r} is neither on {_ON} nor off {_OFF[1:]}"], "environment"
    )


def set_enabled(on: bool) -> None:
    """Set the switch for this process and the workers that it starts."""
    os.environ[SWITCH] = "1" if on else "0"


def program() -> str | None:
    """Return which program VLLM_CONSISTENT_PROGRAM asks for: None (the fastest) or "triton".

    Raises:
        ConfigurationError: another value.
    """
    value = os.environ.get(PROGRAM, "").strip().lower()
    if value in ("", "fastest"):
        return None
    if value == "triton":
        return value
    raise ConfigurationError([f"{PROGRAM}={value!r} is neither fastest nor triton"], "environment")


def batch_invariant_requested() -> bool:
    """Return whether vLLM's own VLLM_BATCH_INVARIANT mode is asked for."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def flashinfer_sampler_requested() -> bool:
    """Return whether vLLM is told to sample with FlashInfer."""
    return os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0") not in ("", "0")


def v2_runner_forced() -> bool:
    """Return whether vLLM is told to use its V2 model runner."""
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0")


def keep_engine_in_process() -> None:
    """Run vLLM's engine core inside this process: no RPC, tensors pass by reference."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def cache_home() -> Path:
    """Return the folder for files that can be made again: $XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-consistent"
