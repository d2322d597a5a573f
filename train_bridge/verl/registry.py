"""Puts our engines into verl's registry, under a vendor of our own.

verl looks an engine up by (device, vendor), then by device. The device's own entries are verl's;
a vendor key is free, and `VERL_ENGINE_VENDOR` asks for one. So a model type that we have no engine
for (a critic) still gets verl's.
"""

from __future__ import annotations

from typing import Any

from train_bridge import env

VENDOR = "train_bridge"
DEVICES = ("cuda", "cpu")


def activate(backend: str) -> None:
    """Register our engine of a backend in this process and make verl choose it. Idempotent.

    Args:
        backend: "fsdp2" or "megatron", which needs megatron-core.

    Raises:
        ConfigurationError: VERL_ENGINE_VENDOR already asks for another vendor's engines.
    """
    env.select_verl_engine(VENDOR)
    from verl.workers.engine import EngineRegistry

    if backend == "megatron":
        from train_bridge.verl.megatron_engine import ConsistentMegatronEngineWithLMHead as engine
    else:
        from train_bridge.verl.engine import ConsistentFSDPEngineWithLMHead as engine

    known = EngineRegistry._engines.get("language_model", {}).get(backend, {})
    devices = [device for device in DEVICES if (device, VENDOR) not in known]
    register(EngineRegistry, engine, backend, devices)


def register(registry: Any, engine: type, backend: str, devices: list[str]) -> None:
    """Register `engine` for language models of `backend` on `devices`."""
    if devices:
        registry.register(
            model_type="language_model", backend=backend, device=devices, vendor=VENDOR
        )(engine)
