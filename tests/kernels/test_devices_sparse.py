"""The sparse attention ops name a tensor on another device, and a program for another device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consistent_kernels.compressor import (
    CompressorParameters,
    compress,
    compress_bwd,
    compress_to_cache,
    compressor_state,
    write_compressor_state,
)
from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.grouped_linear import grouped_linear
from consistent_kernels.hyper_connections import hc_head, hc_post, hc_pre
from consistent_kernels.indexer import indexer_scores, indexer_scores_paged
from consistent_kernels.interleaved_rotary import interleaved_rotary
from consistent_kernels.kv_cache_fp8 import INDEXER, V4, gather_kv_fp8, new_cache, write_kv_fp8
from consistent_kernels.rotary import RopeParameters
from consistent_kernels.sparse_attention import (
    sparse_attention,
    sparse_attention_bwd,
    sparse_attention_fp8,
)
from consistent_kernels.sparse_topk import sparse_topk


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


HALF = RopeParameters(head_dim=64, rotary_dim=64, theta=1e4, max_position=32)
ENTRY = {
    "rope": RopeParameters(head_dim=128, rotary_dim=64, theta=1e4, max_position=32),
    "params": CompressorParameters(4, True, 128, 1e-6),
}
EPS = {"norm_eps": 1e-6, "eps": 1e-6}
Q, KV, ONE = bf16(1, 2, 512), bf16(2, 512), ints(1, 1)
ATTEND = {"scale": 0.1, "d_v": 512}
STATE, ROWS, WEIGHT = torch.zeros(8, 512), ints(1, 8), torch.ones(128)
CACHE, KEYS = new_cache(1, 16, V4, "cpu"), new_cache(1, 16, INDEXER, "cpu")

Call = tuple[Callable[..., object], dict[str, torch.Tensor], dict[str, object]]
CALLS: dict[str, Call] = {
    "interleaved_rotary": (
        interleaved_rotary,
        {"x": bf16(1, 1, 64), "positions": ints(1)},
        {"rope": HALF},
    ),
    "grouped_linear": (grouped_linear, {"x": bf16(1, 1, 64), "weight": bf16(1, 8, 64)}, {}),
    "write_kv_fp8": (
        write_kv_fp8,
        {"cache": CACHE, "kv": KV, "slot_mapping": ints(2)},
        {"layout": V4},
    ),
    "gather_kv_fp8": (
        gather_kv_fp8,
        {
            "cache": CACHE, "positions": ONE, "requests": ints(1), "starts": ints(1),
            "out": bf16(1, 1, 512), "indices": ints(1, 1),
        },
        {"layout": V4},
    ),
    "sparse_attention": (
        sparse_attention,
        {"q": Q, "kv": KV, "indices": ONE, "sinks": torch.zeros(2)},
        ATTEND,
    ),
    "sparse_attention_bwd": (
        sparse_attention_bwd,
        {
            "q": Q, "grad_out": Q, "kv": KV, "indices": ONE, "out": Q, "lse": torch.zeros(1, 2),
            "sinks": torch.zeros(2),
        },
        {"scale": 0.1},
    ),
    "compress": (
        compress,
        {"state": STATE, "rows": ROWS, "positions": ints(1), "weight": WEIGHT},
        ENTRY,
    ),
    "compress_bwd": (
        compress_bwd,
        {
            "state": STATE, "grad_entries": torch.zeros(1, 128), "rows": ROWS,
            "positions": ints(1), "weight": WEIGHT,
        },
        ENTRY,
    ),
    "compress_to_cache": (
        compress_to_cache,
        {
            "state": STATE, "rows": ROWS, "positions": ints(1), "weight": WEIGHT, "cache": KEYS,
            "slots": ints(1),
        },
        {**ENTRY, "layout": INDEXER},
    ),
    "compressor_state": (
        compressor_state,
        {
            "kv_score": torch.zeros(1, 512), "position_bias": torch.zeros(4, 256),
            "positions": ints(1),
        },
        {},
    ),
    "write_compressor_state": (
        write_compressor_state,
        {
            "kv_score": torch.zeros(1, 512), "position_bias": torch.zeros(4, 256),
            "positions": ints(1), "cache": STATE, "slots": ints(1),
        },
        {},
    ),
    "indexer_scores": (
        indexer_scores,
        {
            "q": fp8(1, 32, 128), "weights": torch.zeros(1, 32), "k": fp8(4, 128),
            "k_scale": torch.ones(4), "starts": ints(1), "ends": ints(1),
        },
        {},
    ),
    "indexer_scores_paged": (
        indexer_scores_paged,
        {
            "q": fp8(1, 32, 128), "weights": torch.zeros(1, 32), "cache": KEYS,
            "block_table": ONE, "requests": ints(1), "context_lens": ints(1),
        },
        {"columns": 8},
    ),
    "sparse_topk": (
        sparse_topk,
        {"scores": torch.zeros(1, 8), "starts": ints(1), "ends": ints(1), "tickets": ints(1, 64)},
        {"k": 2},
    ),
    "hc_pre": (
        hc_pre,
        {
            "x": bf16(1, 4, 8), "fn": torch.zeros(24, 32), "scale": torch.zeros(3),
            "base": torch.zeros(24),
        },
        {**EPS, "iterations": 2},
    ),
    "hc_post": (
        hc_post,
        {
            "x": bf16(1, 4, 8), "y": bf16(1, 8), "post": torch.zeros(1, 4),
            "comb": torch.zeros(1, 4, 4),
        },
        {},
    ),
    "hc_head": (
        hc_head,
        {
            "x": bf16(1, 4, 8), "fn": torch.zeros(4, 32), "scale": torch.zeros(1),
            "base": torch.zeros(4),
        },
        EPS,
    ),
    "sparse_attention_fp8": (
        sparse_attention_fp8,
        {"q": Q, "cache": CACHE, "slots": ONE, "sinks": torch.zeros(2)},
        {"scale": 0.1},
    ),
}  # fmt: skip
"""Op to (function, tensors, the rest); the first tensor decides the device."""
FOREIGN = [(op, name) for op, (_, tensors, _) in CALLS.items() for name in list(tensors)[1:]]
NO_PROGRAM = ("compressor_state", "compress_bwd")
"""One PyTorch form serves every device."""
ON_CUDA = [(op, "triton") for op in CALLS if op not in (*NO_PROGRAM, "sparse_attention_fp8")]
ON_CUDA += [("sparse_topk", "cuda"), ("sparse_attention", "flash_mla")]
ON_CUDA += [("sparse_attention_fp8", "flash_mla")]


@pytest.mark.parametrize(("op", "name"), FOREIGN)
def test_op_names_a_tensor_on_another_device(op: str, name: str) -> None:
    function, tensors, rest = CALLS[op]
    with pytest.raises(InvalidInputError, match=f"{op}: .*{name}.* must be .*on cpu, got .*meta"):
        function(**{**tensors, name: tensors[name].to("meta")}, **rest, impl="reference")


@pytest.mark.parametrize(("op", "impl"), ON_CUDA)
def test_op_rejects_tensors_of_a_cpu(op: str, impl: str) -> None:
    function, tensors, rest = CALLS[op]
    wanted = f"{op}: impl '{impl}' on cpu is not supported; supported: CUDA tensors, impl 'ref"
    with pytest.raises(UnsupportedError, match=wanted):
        function(**tensors, **rest, impl=impl)


@pytest.mark.parametrize("op", CALLS)
def test_control_the_reference_takes_them(op: str) -> None:
    function, tensors, rest = CALLS[op]
    function(**tensors, **rest, impl="reference")
