"""The vLLM versions whose internals this package knows."""

from __future__ import annotations

from consistent_kernels.errors import UnsupportedError

SUPPORTED = ("0.25.1",)
"""Exact releases: what is hooked (see layers/, attention/, runner/, patches/) is no public API."""


def check_vllm_version(version: str) -> None:
    """Raise UnsupportedError unless `version` (a local suffix such as +cpu aside) is supported."""
    if version.split("+", 1)[0] not in SUPPORTED:
        raise UnsupportedError(
            "vllm_consistent", f"vLLM {version} (install one of the supported versions)", SUPPORTED
        )
