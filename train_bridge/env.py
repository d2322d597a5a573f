"""The only file of this package that reads the environment."""

from __future__ import annotations

import os

from consistent_kernels.errors import ConfigurationError

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS is run-to-run deterministic only with one of the workspaces below; it reads this once."""

_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


def cublas_is_deterministic() -> bool:
    """Return whether cuBLAS was started with a workspace that makes it deterministic."""
    return os.environ.get(CUBLAS_WORKSPACE, "") in _DETERMINISTIC_WORKSPACES


VERL_ENGINE_VENDOR = "VERL_ENGINE_VENDOR"
"""verl's variable: which vendor's engines its registry returns."""


def select_verl_engine(vendor: str) -> None:
    """Make verl take `vendor`'s engines in this process.

    Raises:
        ConfigurationError: the variable asks for another vendor.
    """
    found = os.environ.setdefault(VERL_ENGINE_VENDOR, vendor)
    if found != vendor:
        raise ConfigurationError(
            [f"{VERL_ENGINE_VENDOR}={found} selects another engine; unset it"], "environment"
        )


def verl_engine_vendor() -> str | None:
    """Return the vendor that verl's variable asks for, or None."""
    return os.environ.get(VERL_ENGINE_VENDOR) or None


VLLM_PLUGINS = "VLLM_PLUGINS"
"""vLLM's variable: names of the plugins to load; unset, all are."""


def vllm_plugins() -> str | None:
    """Return what VLLM_PLUGINS says, or None where it is unset."""
    return os.environ.get(VLLM_PLUGINS)


def batch_invariant() -> str | None:
    """Return what vLLM's VLLM_BATCH_INVARIANT says, or None where it is unset."""
    return os.environ.get("VLLM_BATCH_INVARIANT")


def flashinfer_sampler() -> str | None:
    """Return what vLLM's VLLM_USE_FLASHINFER_SAMPLER says, or None where it is unset."""
    return os.environ.get("VLLM_USE_FLASHINFER_SAMPLER")
