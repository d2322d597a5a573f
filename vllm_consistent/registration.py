"""Whether this process has been hooked: kept apart, so that reports need not import the plugin."""

from __future__ import annotations

_HOOKED: list[str] = []


def is_registered() -> bool:
    """Return whether `plugin.register` has hooked vLLM in this process."""
    return bool(_HOOKED)


def note_registered(vllm_version: str) -> None:
    """Note that vLLM of this version is being hooked."""
    _HOOKED.append(vllm_version)


def forget_registered() -> None:
    """Take the note back: a half-registered plugin must not look registered."""
    _HOOKED.clear()
