"""From a model and a device to its contract: the one place where implementations are chosen."""

from __future__ import annotations

import importlib

from consistent_kernels.contract import Contract, OpSpec
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.model_facts import ModelFacts
from consistent_kernels.program_source import toolchain

DENSE_BF16 = "dense_bf16_v1"
DENSE_OPS = (
    "attention",
    "embedding",
    "linear",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "token_logprobs",
)
_IMPLEMENTATION_OF_DEVICE = {"cpu": "reference", "cuda": "triton"}


def dense_specs() -> dict[str, OpSpec]:
    """Return the spec of every op of a dense model, the part that a contract file freezes."""
    return {op: importlib.import_module(f"consistent_kernels.{op}.spec").SPEC for op in DENSE_OPS}


def choose_implementation(op: str, device_type: str) -> str:
    """Return the implementation of `op` on a device type, the one that a contract names.

    Raises:
        UnsupportedError: another device type.
    """
    if device_type not in _IMPLEMENTATION_OF_DEVICE:
        raise UnsupportedError("contract", f"device {device_type!r}", _IMPLEMENTATION_OF_DEVICE)
    choose = getattr(importlib.import_module(f"consistent_kernels.{op}.spec"), "choose", None)
    return choose(device_type) if choose else _IMPLEMENTATION_OF_DEVICE[device_type]


def resolve_contract(facts: ModelFacts, device_type: str) -> Contract:
    """Return the contract of a dense BF16 model on this machine's `device_type`.

    Args:
        facts: what the model is, from `model_facts(config, dtype)`.
        device_type: "cpu" or "cuda"; for "cuda" the current device's architecture counts.

    Raises:
        UnsupportedError: another device type.
    """
    programs = {}
    for op in DENSE_OPS:
        impl = choose_implementation(op, device_type)
        programs[op] = importlib.import_module(f"consistent_kernels.{op}.spec").program(impl)
    return Contract(DENSE_BF16, facts.to_dict(), toolchain(device_type), dense_specs(), programs)
