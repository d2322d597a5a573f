"""The contract of an attention block: what engine and trainer compare at start-up."""

from __future__ import annotations

import dataclasses
import importlib

from consistent_kernels.blocks.parameters import BlockPrograms, V4Parameters, V32Parameters
from consistent_kernels.contract import Contract, Program, Scalar, float_bits
from consistent_kernels.program_source import source_sha256, toolchain
from consistent_kernels.resolve import SPARSE_BLOCK, op_spec

_SHARED_OPS = (
    "grouped_linear",
    "indexer",
    "interleaved_rotary",
    "kv_cache_fp8",
    "linear",
    "quantization",
    "rms_norm",
    "sparse_topk",
)
"""Of both blocks, with one of the two ways to read the cache."""
V32_OPS = (*_SHARED_OPS, "rotary")
V4_OPS = (*_SHARED_OPS, "compressor")


def _facts(params: V32Parameters | V4Parameters) -> dict[str, Scalar]:
    form = "v32.py" if isinstance(params, V32Parameters) else "v4.py"
    facts: dict[str, Scalar] = {
        "block": type(params).__name__,
        # The order of the ops, what lies between them, and V3.2's layer norm.
        "block_source": source_sha256(
            "blocks", "ops.py", "layer_norm.py", form, shared=("tree.py",)
        ),
    }
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name == "rope":
            facts |= {f"rope.{key}": item for key, item in value.to_dict().items()}
        else:
            facts[field.name] = float_bits(value) if isinstance(value, float) else value
    return facts


def _program(op: str, programs: BlockPrograms) -> Program:
    if op == "sparse_attention_fp8":
        return importlib.import_module("consistent_kernels.sparse_attention.spec").fp8_program(
            programs.attention
        )
    own = {
        "linear": programs.linear,
        "grouped_linear": programs.grouped_linear,
        "indexer": programs.indexer,
        "kv_cache_fp8": programs.kv_cache,
        "sparse_attention": programs.attention,
        "sparse_topk": programs.topk,
    }
    spec = importlib.import_module(f"consistent_kernels.{op}.spec")
    return spec.program(own.get(op, programs.other))


def block_contract(
    params: V32Parameters | V4Parameters, programs: BlockPrograms, device_type: str
) -> Contract:
    """Return the specs and programs of a block's ops on this machine, with the block's numbers.

    Args:
        params: of the block.
        programs: the implementation of each op.
        device_type: "cpu" or "cuda".

    Raises:
        MissingBinaryError: a program that is made of a library which is not installed.
    """
    attention = "sparse_attention_fp8" if programs.read == "fp8" else "sparse_attention"
    ops = (attention, *(V32_OPS if isinstance(params, V32Parameters) else V4_OPS))
    return Contract(
        name=SPARSE_BLOCK,
        model=_facts(params),
        toolchain=toolchain(device_type),
        specs={op: op_spec(op) for op in ops},
        programs={op: _program(op, programs) for op in ops},
    )
