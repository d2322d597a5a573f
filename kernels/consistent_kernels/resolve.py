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
MOE_BF16 = "moe_bf16_v1"
OPS_OF_CONTRACT = {DENSE_BF16: DENSE_OPS, MOE_BF16: (*DENSE_OPS, "experts", "router")}
_IMPLEMENTATION_OF_DEVICE = {"cpu": "reference", "cuda": "triton"}


def contract_name(facts: ModelFacts) -> str:
    """Return the name and version of the contract that covers a model."""
    return MOE_BF16 if facts.moe else DENSE_BF16


def contract_specs(name: str) -> dict[str, OpSpec]:
    """Return the spec of every op of a contract, the part that its file freezes.

    Raises:
        UnsupportedError: unknown name.
    """
    if name not in OPS_OF_CONTRACT:
        raise UnsupportedError("contract", repr(name), OPS_OF_CONTRACT)
    ops = OPS_OF_CONTRACT[name]
    return {op: importlib.import_module(f"consistent_kernels.{op}.spec").SPEC for op in ops}


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
    """Return the contract of a BF16 model on this machine's `device_type`.

    Args:
        facts: what the model is, from `model_facts(config, dtype)`.
        device_type: "cpu" or "cuda"; for "cuda" the current device's architecture counts.

    Raises:
        UnsupportedError: another device type.
    """
    name = contract_name(facts)
    programs = {}
    for op in OPS_OF_CONTRACT[name]:
        impl = choose_implementation(op, device_type)
        programs[op] = importlib.import_module(f"consistent_kernels.{op}.spec").program(impl)
    return Contract(name, facts.to_dict(), toolchain(device_type), contract_specs(name), programs)
