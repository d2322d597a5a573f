"""Indices out of range of the sparse attention ops: an error of ours that says which and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistent_kernels.compressor import (
    CompressorParameters,
    compress,
    compress_bwd,
    compress_to_cache,
    paged_windows,
    write_compressor_state,
)
from consistent_kernels.errors import InvalidInputError
from consistent_kernels.indexer import indexer_scores, indexer_scores_paged, quantize_indexer_q
from consistent_kernels.interleaved_rotary import interleaved_rotary
from consistent_kernels.kv_cache_fp8 import (
    INDEXER,
    V4,
    gather_indexer_k,
    gather_kv_fp8,
    new_cache,
    write_kv_fp8,
)
from consistent_kernels.rotary import RopeParameters
from consistent_kernels.sparse_attention import (
    read_slots_fp8,
    sparse_attention,
    sparse_attention_fp8,
    window_and_selected,
)
from consistent_kernels.sparse_topk import sparse_topk


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


REF = {"impl": "reference"}
TABLE = ints(0, 1)[None]
CACHE, KEYS = new_cache(2, 16, V4, "cpu"), new_cache(2, 16, INDEXER, "cpu")
KV = torch.zeros(2, 512, dtype=torch.bfloat16)
Q = torch.ones(1, 2, 512, dtype=torch.bfloat16)
HEAD = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
ROPE = RopeParameters(head_dim=64, rotary_dim=64, theta=1e4, max_position=32)
WINDOW = CompressorParameters(4, True, 128, 1e-6)
ENTRY = {
    "rope": RopeParameters(head_dim=128, rotary_dim=64, theta=1e4, max_position=32),
    "params": WINDOW,
    "impl": "reference",
}
STATE, ROWS, WEIGHT = torch.zeros(8, 512), torch.arange(8, dtype=torch.int32)[None], torch.ones(128)
Q8 = torch.zeros(1, 16, 128).to(torch.float8_e4m3fn)
K8 = torch.zeros(4, 128).to(torch.float8_e4m3fn)


def turn(*positions: int) -> Callable[[], Any]:
    return lambda: interleaved_rotary(ints(*positions), HEAD, rope=ROPE, **REF)


def gather(position: int, request: int, **places: torch.Tensor) -> Callable[[], Any]:
    at = (ints(position)[None], ints(request))
    return lambda: gather_kv_fp8(CACHE, *at, layout=V4, **REF, **places)


def index_keys(position: int, request: int) -> Callable[[], Any]:
    return lambda: gather_indexer_k(KEYS, ints(position)[None], ints(request), starts=ints(0))


def attend(index: int) -> Callable[[], Any]:
    return lambda: sparse_attention(Q, KV, ints(0, index)[None], scale=0.1, d_v=512, **REF)


def attend_fp8(slot: int, more: int = 0) -> Callable[[], Any]:
    extra = (CACHE, ints(0, more)[None])
    slots = ints(0, slot)[None]
    return lambda: sparse_attention_fp8(Q, CACHE, slots, extra=extra, scale=0.1, **REF)


def entry(row: int = 0, position: int = 4) -> Callable[[], Any]:
    return lambda: compress(STATE, ROWS + row, ints(position), WEIGHT, **ENTRY)


def entry_to_cache(row: int, position: int, slot: int) -> Callable[[], Any]:
    args = (STATE, ROWS + row, ints(position), WEIGHT, KEYS, ints(slot))
    return lambda: compress_to_cache(*args, layout=INDEXER, **ENTRY)


def state(position: int, slot: int) -> Callable[[], Any]:
    args = (torch.zeros(1, 512), torch.zeros(4, 256), ints(position), torch.zeros(8, 512))
    return lambda: write_compressor_state(*args, ints(slot), **REF)


def windows(position: int, request: int) -> Callable[[], Any]:
    return lambda: paged_windows(ints(position), ints(request), TABLE, 16, WINDOW)


def scores(start: int, end: int) -> Callable[[], Any]:
    args = (Q8, torch.zeros(1, 16), K8, torch.ones(4), ints(start), ints(end))
    return lambda: indexer_scores(*args, **REF)


def paged(length: int, request: int = 0, page: int = 0, columns: int = 64) -> Callable[[], Any]:
    args = (Q8, torch.zeros(1, 16), KEYS, ints(page, 1)[None], ints(request), ints(length))
    return lambda: indexer_scores_paged(*args, columns=columns, **REF)


def top(start: int, end: int) -> Callable[[], Any]:
    return lambda: sparse_topk(torch.zeros(1, 8), ints(start), ints(end), 2, **REF)


BAD = {
    r"interleaved_rotary: positions\[1\] must be .* 31, got 32": turn(0, 32),
    r"interleaved_rotary: positions\[1\] must be .* 31, got -1": turn(0, -1),
    "write_kv_fp8: slot_mapping must be below 32, got 32": lambda: write_kv_fp8(
        KV, CACHE, ints(0, 32), layout=V4, **REF
    ),
    "gather_kv_fp8: positions must be below 32, got 40": gather(40, 0, block_table=TABLE),
    "gather_kv_fp8: requests must be below 1, got 1": gather(4, 1, block_table=TABLE),
    "gather_kv_fp8: requests must be at least 0 .* got -1": gather(4, -1, block_table=TABLE),
    "gather_kv_fp8: block_table must be below 32, got 116": gather(4, 0, block_table=TABLE + 7),
    "gather_kv_fp8: block_table must be at least 0": gather(4, 0, block_table=TABLE - 1),
    "gather_kv_fp8: starts must be at least 0 .* got -2": gather(1, 0, starts=ints(-3)),
    "gather_indexer_k: starts must be below 32, got 40": index_keys(40, 0),
    "gather_indexer_k: positions must be at least 0, got -1": index_keys(-1, 0),
    "gather_indexer_k: requests must be below 1, got 3": index_keys(1, 3),
    r"sparse_attention: indices\[0, 1\] must be -1 or a row of kv below 2, got 5": attend(5),
    r"sparse_attention: indices\[0, 1\] must be .* got -2": attend(-2),
    r"sparse_attention_fp8: slots\[0, 1\] must be -1 or a slot below 32, got 32": attend_fp8(32),
    r"sparse_attention_fp8: slots\[0, 1\] must be .* got -2": attend_fp8(-2),
    r"sparse_attention_fp8: slots of extra\[0, 1\] must be .* got 32": attend_fp8(0, 32),
    r"read_slots_fp8: slots\[1\] must be below 32, got 32": lambda: read_slots_fp8(
        CACHE, ints(0, 32), V4
    ),
    r"window_and_selected: window must be at least 1": lambda: window_and_selected(
        ints(3), window=0, window_base=ints(0)
    ),
    r"compress: rows\[0, 7\] must be -1 or a row of state below 8, got 8": entry(row=1),
    r"compress: rows\[0, 0\] must be .* got -2": entry(row=-2),
    r"compress: positions\[0\] must be below rope.max_position 32, got 32": entry(position=32),
    r"compress: positions\[0\] must be .* got -1": entry(position=-1),
    r"compress_bwd: rows\[0, 7\] must be .* got 8": lambda: compress_bwd(
        torch.zeros(1, 128), STATE, ROWS + 1, ints(4), WEIGHT, **ENTRY
    ),
    r"compress_to_cache: slots\[0\] must be from 0 to 31, got 32": entry_to_cache(0, 4, 32),
    r"compress_to_cache: rows\[0, 7\] must be .* got 8": entry_to_cache(1, 4, 3),
    r"compress_to_cache: positions\[0\] must be .* got 32": entry_to_cache(0, 32, 3),
    r"write_compressor_state: slots\[0\] must be negative or below 8, got 8": state(3, 8),
    r"write_compressor_state: positions\[0\] must be from 0": state(-3, 0),
    r"paged_windows: requests\[0\] must be from 0 to 0, got 2": windows(3, 2),
    r"paged_windows: positions\[0\] must be from 0 to 31, got 63": windows(63, 0),
    "indexer_scores: starts, ends must be 0 <= start <= end <= 4, got 0, 5": scores(0, 5),
    "indexer_scores: starts, ends must be .* got -1, 3": scores(-1, 3),
    "indexer_scores: starts, ends must be .* got 3, 2": scores(3, 2),
    r"indexer_scores_paged: context_lens\[0\] must be from 0 to 32, got 33": paged(33),
    r"indexer_scores_paged: context_lens\[0\] must be from 0 to 8, got 20": paged(20, columns=8),
    r"indexer_scores_paged: context_lens\[0\] must be .* got -1": paged(-1),
    r"indexer_scores_paged: requests\[0\] must be from 0 to 0, got 1": paged(3, request=1),
    r"indexer_scores_paged: requests\[0\] must be .* got -1": paged(3, request=-1),
    r"indexer_scores_paged: block_table\[requests\]\[0, 0\] must be .* got 9": paged(3, page=9),
    r"indexer_scores_paged: block_table\[requests\]\[0, 0\] must be .* got -1": paged(3, page=-1),
    "indexer_scores_paged: columns must be at least 0, got -1": paged(0, columns=-1),
    "sparse_topk: starts, ends must be 0 <= start <= end <= 8, got 0, 9 in row 0": top(0, 9),
    "sparse_topk: starts, ends must be .* got -1, 3": top(-1, 3),
    "sparse_topk: starts, ends must be .* got 3, 2": top(3, 2),
    r"quantize_indexer_q: q must be .* float32 of shape \[T, H, 128\]": lambda: quantize_indexer_q(
        torch.zeros(4, 128), torch.zeros(4, 1), softmax_scale=1.0, head_scale=1.0, **REF
    ),
    r"quantize_indexer_q: weights must be floats of shape \(4, 16\)": lambda: quantize_indexer_q(
        torch.zeros(4, 16, 128), torch.zeros(4, 1), softmax_scale=1.0, head_scale=1.0, **REF
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_an_index_out_of_range_is_named(message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BAD[message]()


def test_what_no_position_needs_may_hold_anything() -> None:
    """The checks look at no padding: absent entries, pages behind a context, slots of -1."""
    none = ints(-1)[None]
    assert not bool(gather_kv_fp8(CACHE, none, ints(-1), layout=V4, block_table=TABLE, **REF).any())
    assert paged(3, page=0)().shape == (1, 64)
    far = ints(0, 99)[None]
    args = (Q8, torch.zeros(1, 16), KEYS, far, ints(0), ints(16))
    assert indexer_scores_paged(*args, columns=64, **REF).shape == (1, 64)
    entry_to_cache(1, 99, -1)()
    state(-3, -1)()
    out, lse = sparse_attention(Q, KV[:0], none, scale=0.1, d_v=512, **REF)
    assert not bool(out.any())
    assert bool((lse == float("inf")).all())
