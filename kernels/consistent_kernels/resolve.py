"""From a model and a device to its contract: the one place where implementations are chosen."""

from __future__ import annotations

import importlib

from consistent_kernels.contract import Contract, OpSpec
from consistent_kernels.errors import UnsupportedError, require_implementation
from consistent_kernels.model_facts import ModelFacts
from consistent_kernels.program_source import cuda_architecture, toolchain

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
DENSE_BLOCK_FP8 = "dense_block_fp8_v1"
DENSE_FP8_OPS = (*DENSE_OPS, "fp8_linear", "quantization")
MOE_BLOCK_FP8 = "moe_block_fp8_v1"
SPARSE_BLOCK = "sparse_attention_block_v2"
SPARSE_BLOCK_OPS = (
    "compressor",
    "grouped_linear",
    "hyper_connections",
    "indexer",
    "interleaved_rotary",
    "kv_cache_fp8",
    "linear",
    "quantization",
    "rms_norm",
    "rotary",
    "sparse_attention",
    "sparse_attention_fp8",
    "sparse_topk",
)
"""Every op of a V3.2 or V4 attention block and of the streams around it; a block's own contract
(`blocks.block_contract`) holds those of them that it calls."""
OPS_OF_CONTRACT = {
    DENSE_BF16: DENSE_OPS,
    MOE_BF16: (*DENSE_OPS, "experts", "router"),
    DENSE_BLOCK_FP8: DENSE_FP8_OPS,
    MOE_BLOCK_FP8: (*DENSE_FP8_OPS, "fp8_experts", "router"),
    SPARSE_BLOCK: SPARSE_BLOCK_OPS,
}
_SPEC_OF_OP = {"sparse_attention_fp8": ("sparse_attention", "FP8_SPEC")}
"""(folder, name) of a spec that is not the SPEC of its op's own folder."""
_IMPLEMENTATION_OF_DEVICE = {"cpu": "reference", "cuda": "triton"}
PROGRAMS = (None, "triton")
"""What may be asked for: the fastest program (None), or on CUDA our own kernels alone."""


def contract_name(facts: ModelFacts) -> str:
    """Return the name and version of the contract that covers a model."""
    if facts.quantization:
        return MOE_BLOCK_FP8 if facts.moe else DENSE_BLOCK_FP8
    return MOE_BF16 if facts.moe else DENSE_BF16


def op_spec(op: str) -> OpSpec:
    """Return the spec of an op."""
    folder, name = _SPEC_OF_OP.get(op, (op, "SPEC"))
    return getattr(importlib.import_module(f"consistent_kernels.{folder}.spec"), name)


def contract_specs(name: str) -> dict[str, OpSpec]:
    """Return the spec of every op of a contract, the part that its file freezes.

    Raises:
        UnsupportedError: unknown name.
    """
    if name not in OPS_OF_CONTRACT:
        raise UnsupportedError("contract", repr(name), OPS_OF_CONTRACT)
    return {op: op_spec(op) for op in OPS_OF_CONTRACT[name]}


def choose_implementation(
    op: str, device_type: str, facts: ModelFacts | None = None, only: str | None = None
) -> str:
    """Return the implementation of `op` on a device type, the one that a contract names.

    Args:
        op: the op.
        device_type: "cpu" or "cuda".
        facts: of the model; without them, what serves every model of the device.
        only: "triton" takes our own kernels on CUDA and none out of vLLM's wheel; None the fastest.

    Raises:
        UnsupportedError: another device type, or `only` is unknown.
    """
    if device_type not in _IMPLEMENTATION_OF_DEVICE:
        raise UnsupportedError("contract", f"device {device_type!r}", _IMPLEMENTATION_OF_DEVICE)
    if only not in PROGRAMS:
        raise UnsupportedError("contract", f"program {only!r}", PROGRAMS)
    choose = getattr(importlib.import_module(f"consistent_kernels.{op}.spec"), "choose", None)
    if choose is None or (only == "triton" and device_type == "cuda"):
        return _IMPLEMENTATION_OF_DEVICE[device_type]
    return choose(device_type, cuda_architecture() if device_type == "cuda" else None, facts)


def resolve_contract(
    facts: ModelFacts, device_type: str, *, only: str | None = None, like: Contract | None = None
) -> Contract:
    """Return the contract of a model on this machine's `device_type`.

    Args:
        facts: what the model is, from `model_facts(config, dtype)`.
        device_type: "cpu" or "cuda"; for "cuda" the current device's architecture counts.
        only: as in `choose_implementation`.
        like: take the implementations that this contract names (the engine's, say); sources,
            schedules and binaries are this side's all the same, and so the digest tells.

    Raises:
        UnsupportedError: another device type, or an implementation that does not exist here.
        MissingBinaryError: an implementation's binary is not installed.
    """
    name = contract_name(facts)
    programs = {}
    for op in OPS_OF_CONTRACT[name]:
        if like is not None and op in like.programs:
            impl = like.implementation(op)
            choices = importlib.import_module(f"consistent_kernels.{op}.spec").IMPLEMENTATIONS
            require_implementation(op, impl, choices)
        else:
            impl = choose_implementation(op, device_type, facts, only)
        programs[op] = importlib.import_module(f"consistent_kernels.{op}.spec").program(impl)
    return Contract(name, facts.to_dict(), toolchain(device_type), contract_specs(name), programs)
