"""Shapes, dtypes and layouts that a sparse attention op cannot take: an error that names them.

Without it PyTorch would broadcast, cut off or read elsewhere, and return a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistent_kernels.blocks.layer_norm import index_layer_norm
from consistent_kernels.compressor import (
    CompressorParameters,
    compress,
    compress_bwd,
    compressor_state,
    compressor_state_bwd,
    packed_windows,
    paged_windows,
)
from consistent_kernels.errors import ConsistencyError, InvalidInputError
from consistent_kernels.grouped_linear import grouped_linear, grouped_linear_bwd
from consistent_kernels.hyper_connections import hc_head_bwd, hc_post_bwd, hc_pre, hc_pre_bwd
from consistent_kernels.indexer import indexer_scores, indexer_scores_paged, quantize_indexer_q
from consistent_kernels.kv_cache_fp8 import (
    INDEXER,
    V4,
    V32,
    WorkspaceBounds,
    new_cache,
    round_trip_kv_fp8,
    workspace_indices,
)
from consistent_kernels.rotary import RopeParameters
from consistent_kernels.sparse_attention import (
    check_indices,
    read_slots_fp8,
    sparse_attention,
    sparse_attention_bwd,
    sparse_attention_fp8,
    window_and_selected,
)
from consistent_kernels.sparse_topk import sparse_topk
from consistent_kernels.sparse_topk.triton import sparse_topk_fwd

REF = {"impl": "reference"}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


X, FN, SCALE, BASE = torch.ones(3, 4, 32), torch.ones(24, 128), torch.ones(3), torch.ones(24)
MAPS = {"norm_eps": 1e-6, "eps": 1e-6, **REF}
INPUT, POST, COMB = torch.ones(3, 32), torch.ones(3, 4), torch.ones(3, 4, 4)
WINDOW = CompressorParameters(4, True, 128, 1e-6)
CACHE = new_cache(2, 16, V4, "cpu")
APART = torch.zeros(2, 16, 2 * V4.token_bytes, dtype=torch.uint8)[:, :, ::2]
Q, KV = torch.ones(2, 3, 512, dtype=torch.bfloat16), torch.ones(9, 512, dtype=torch.bfloat16)
SLOTS = torch.stack((ints(0, 3), ints(2, -1)))
TABLE = ints(0, 1)[None]
Q8 = Q[..., :128].to(torch.float8_e4m3fn)
META = POST.to("meta")
ROPE = RopeParameters(head_dim=128, rotary_dim=64, theta=1e4, max_position=32)


def pre_bwd(*grads: torch.Tensor) -> Callable[[], Any]:
    return lambda: hc_pre_bwd(*grads, X, FN, SCALE, BASE, iterations=2, **MAPS)


def back(indices: torch.Tensor) -> Callable[[], Any]:
    lse = torch.zeros(2, 3)
    return lambda: sparse_attention_bwd(Q, Q, KV, indices, Q, lse, scale=0.1, **REF)


def windows(positions: torch.Tensor, requests: torch.Tensor, *places: Any) -> Callable[[], Any]:
    return lambda: paged_windows(positions, requests, *places, WINDOW)


BAD: dict[str, Callable[[], Any]] = {
    "sparse_topk: k must be an integer from 1 to 2048, got 2.5": lambda: sparse_topk(
        torch.ones(1, 4), ints(0), ints(4), 2.5, **REF
    ),
    r"hc_pre_bwd: grad_input must be .* \(3, 32\), got .* \(1, 32\)": pre_bwd(
        INPUT[:1], POST, COMB
    ),
    r"hc_pre_bwd: grad_post must be .* \(3, 4\), got .* \(1, 4\)": pre_bwd(INPUT, POST[:1], COMB),
    r"hc_pre_bwd: grad_comb must be .* \(3, 4, 4\), got .* \(1, 4, 4\)": pre_bwd(
        INPUT, POST, COMB[:1]
    ),
    "hc_pre_bwd: grad_input must be floats .* got torch.int32": pre_bwd(INPUT.int(), POST, COMB),
    r"hc_head_bwd: grad_out must be .* \(3, 32\), got .* \(1, 32\)": lambda: hc_head_bwd(
        INPUT[:1], X, FN[:4], SCALE[:1], BASE[:4], **MAPS
    ),
    r"hc_post_bwd: grad_out must be .* \(3, 4, 32\), got .* \(1, 4, 32\)": lambda: hc_post_bwd(
        X[:1], INPUT, X, POST, COMB, **REF
    ),
    "sparse_topk: tickets must be contiguous, 32 columns wide, got .1, 1.": lambda: sparse_topk_fwd(
        torch.ones(1, 4), ints(0), ints(4), 2, ints(0)[None]
    ),
    "grouped_linear_bwd: grad_y must be floats .* got torch.int32": lambda: grouped_linear_bwd(
        torch.ones(3, 2, 5).int(), torch.ones(3, 2, 4), torch.ones(2, 5, 4), **REF
    ),
    r"hc_pre: x must be .* at least one column": lambda: hc_pre(
        X[..., :0], FN[:, :0], SCALE, BASE, iterations=2, **MAPS
    ),
    "grouped_linear: x must be .* at least one column": lambda: grouped_linear(
        torch.ones(3, 2, 0), torch.ones(2, 5, 0), **REF
    ),
    "compressor_state_bwd: grad_state must be floats .* even": lambda: compressor_state_bwd(
        torch.ones(4, 7), ints(0, 1, 2, 3), 4
    ),
    r"compressor_state_bwd: positions must be integers of shape \(4,\)": lambda: (
        compressor_state_bwd(torch.ones(4, 8), ints(0), 4)
    ),
    "packed_windows: cu_seqlens must be ascending from at least 0": lambda: packed_windows(
        torch.tensor([0, 9, 4]), WINDOW
    ),
    "packed_windows: cu_seqlens must be ascending from at least 0, got .-4": lambda: packed_windows(
        torch.tensor([-4, 9]), WINDOW
    ),
    "packed_windows: cu_seqlens must be 1-D integers": lambda: packed_windows(
        torch.tensor([0.0, 9.0]), WINDOW
    ),
    r"packed_windows: cu_seqlens must be 1-D integers, got torch.int64 \(1, 2\)": lambda: (
        packed_windows(torch.tensor([[0, 9]]), WINDOW)
    ),
    r"paged_windows: requests must be integers of shape \(2,\)": windows(
        ints(1, 2), ints(0), TABLE, 16
    ),
    "paged_windows: positions must be 1-D integers": windows(torch.ones(1), ints(0), TABLE, 16),
    "paged_windows: block_table must be 2-D integers": windows(ints(1), ints(0), TABLE[0], 16),
    "paged_windows: block_size must be at least 1, got 0": windows(ints(1), ints(0), TABLE, 0),
    r"paged_windows: block_table\[requests\]\[0, 4\] must be .* got -1": windows(
        ints(3), ints(0), TABLE - 1, 16
    ),
    "new_cache: blocks, block_size must be at least 0 and 1, got -2, 16": lambda: new_cache(
        -2, 16, V4, "cpu"
    ),
    "workspace_indices: positions must be 2-D integers": lambda: workspace_indices(
        torch.ones(2, 2)
    ),
    r"workspace_indices: requests must be integers of shape \(1,\)": lambda: workspace_indices(
        TABLE, ints(0, 0), 5
    ),
    "WorkspaceBounds: selected_queries must be at least 0, got -1": lambda: WorkspaceBounds(
        V4, -1, 4
    ),
    "sparse_attention_fp8: cache must be packed inside a block": lambda: sparse_attention_fp8(
        Q, APART, SLOTS, scale=0.1, **REF
    ),
    "sparse_attention_fp8: extra must be packed inside a block": lambda: sparse_attention_fp8(
        Q, CACHE, SLOTS, extra=(APART, SLOTS), scale=0.1, **REF
    ),
    "read_slots_fp8: cache must be uint8 .* 656": lambda: read_slots_fp8(CACHE, SLOTS, V32),
    "read_slots_fp8: slots must be integers": lambda: read_slots_fp8(CACHE, SLOTS.float(), V4),
    r"sparse_attention_bwd: indices\[0, 0\] must be .* below 9, got 9": back(SLOTS + 9),
    r"sparse_attention_bwd: indices\[1, 1\] must be .* got -2": back(SLOTS - 1),
    "window_and_selected: multiple must be at least 1, got 0": lambda: window_and_selected(
        ints(3), window=2, window_base=ints(0), multiple=0
    ),
    "sparse_attention: indices must be integers, got torch.float32": lambda: check_indices(
        SLOTS.float(), 4
    ),
    "index_layer_norm: x must be floats": lambda: index_layer_norm(
        torch.ones(2, 4, dtype=torch.int32), torch.ones(4), torch.ones(4), 1e-6
    ),
    "hc_pre_bwd: grad_post must be on cpu, got meta": pre_bwd(INPUT, META, COMB),
    "hc_pre: iterations must be an integer, at least 1, got 2.5": lambda: hc_pre(
        X, FN, SCALE, BASE, iterations=2.5, **MAPS
    ),
    "hc_post_bwd: grad_out must be on cpu, got meta": lambda: hc_post_bwd(
        X.to("meta"), INPUT, X, POST, COMB, **REF
    ),
    "grouped_linear: x must be .* one group": lambda: grouped_linear(
        torch.ones(3, 0, 4), torch.ones(0, 5, 4), **REF
    ),
    "grouped_linear_bwd: grad_y must be on cpu, got meta": lambda: grouped_linear_bwd(
        torch.ones(3, 2, 5, device="meta"), torch.ones(3, 2, 4), torch.ones(2, 5, 4), **REF
    ),
    "sparse_attention: q must be .* at least one head": lambda: sparse_attention(
        Q[:, :0], KV, SLOTS, scale=0.1, d_v=512, **REF
    ),
    "sparse_attention_fp8: q must be .* at least one head": lambda: sparse_attention_fp8(
        Q[:, :0], CACHE, SLOTS, scale=0.1, **REF
    ),
    r"sparse_attention_bwd: out must be \[T, H, d_v\], got \(3, 512\)": lambda: (
        sparse_attention_bwd(Q[0], Q, KV, SLOTS, Q[0], torch.zeros(2, 3), scale=0.1, **REF)
    ),
    r"sparse_attention_bwd: out must be .* \(2, 3, 512\), got .* \(1, 3, 512\)": lambda: (
        sparse_attention_bwd(Q[:1], Q, KV, SLOTS, Q[:1], torch.zeros(2, 3), scale=0.1, **REF)
    ),
    "indexer_scores: q must be .* at least one head": lambda: indexer_scores(
        Q8[:, :0], torch.ones(2, 0), Q8[:, 0], torch.ones(2), ints(0, 0), ints(2, 2), **REF
    ),
    "quantize_indexer_q: weights must be on cpu, got meta": lambda: quantize_indexer_q(
        torch.ones(3, 4, 128), META, softmax_scale=1.0, head_scale=1.0, **REF
    ),
    "quantize_indexer_q: q must be bfloat16, .* got torch.float64": lambda: quantize_indexer_q(
        torch.ones(3, 4, 128).double(), POST, softmax_scale=1.0, head_scale=1.0, **REF
    ),
    "compressor: ratio must be an integer, at least 1, got 4.0": lambda: CompressorParameters(
        4.0, True, 128, 1e-6
    ),
    "compressor: head_dim must be an integer, at least 1, got 0": lambda: CompressorParameters(
        4, True, 0, 1e-6
    ),
    "compressor_state: position_bias must be .* at least 1, got .* .0, 4.": lambda: (
        compressor_state(torch.ones(1, 8), torch.ones(0, 4), ints(0), **REF)
    ),
    "compressor_state_bwd: ratio must be at least 1, got 0": lambda: compressor_state_bwd(
        torch.ones(1, 8), ints(0), 0
    ),
    "compressor_state_bwd: positions must be on cpu, got meta": lambda: compressor_state_bwd(
        torch.ones(1, 8), ints(0).to("meta"), 4
    ),
    r"compress: rows must be \[E, 8\], got \(8,\)": lambda: compress(
        torch.ones(9, 512),
        torch.arange(8).int(),
        ints(0),
        torch.ones(128),
        rope=ROPE,
        params=WINDOW,
        **REF,
    ),
    "compress_bwd: grad_entries must be floats .* got torch.int32": lambda: compress_bwd(
        torch.ones(1, 128).int(),
        torch.ones(9, 512),
        torch.arange(8).int()[None],
        ints(0),
        torch.ones(128),
        rope=ROPE,
        params=WINDOW,
        **REF,
    ),
    r"window_and_selected: positions must be \[T\], got \(\)": lambda: window_and_selected(
        torch.tensor(3), window=2, window_base=ints(0)
    ),
    r"window_and_selected: selected must be integers \[1, K\], got \(1,\)": lambda: (
        window_and_selected(
            ints(3), window=2, window_base=ints(0), selected=ints(1), selected_base=ints(0)
        )
    ),
    "window_and_selected: window_base must be on cpu, got meta": lambda: window_and_selected(
        ints(3), window=2, window_base=ints(0).to("meta")
    ),
    r"indexer_scores_paged: block_table must be .* got 2-D torch.int32 of strides \(1, 2\)": (
        lambda: indexer_scores_paged(
            Q8,
            torch.ones(2, 3),
            new_cache(2, 16, INDEXER, "cpu"),
            torch.zeros(4, dtype=torch.int32).as_strided((2, 2), (1, 2)),
            None,
            ints(1, 1),
            columns=4,
            **REF,
        )
    ),
    "round_trip_kv_fp8: block_size must be at least 1, got 0": lambda: round_trip_kv_fp8(
        KV, layout=V4, block_size=0, **REF
    ),
    r"WorkspaceBounds.view: workspace must be \[at least 8, 512\], got \(4, 512\)": lambda: (
        WorkspaceBounds(V4, 2, 4).view(KV[:4], 2, 4)
    ),
    "index_layer_norm: weight must be on cpu": lambda: index_layer_norm(
        torch.ones(2, 4), torch.ones(4, device="meta"), torch.ones(4), 1e-6
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_an_op_cannot_take_is_named(message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BAD[message]()


def test_one_stream_is_refused() -> None:
    """V4 has four; one would make Sinkhorn of a single number, and no tree to sum."""
    with pytest.raises(ConsistencyError, match=r"hc_pre: 1 streams .* supported: 2, 4, 8"):
        hc_pre(X[:, :1], torch.ones(3, 32), SCALE, torch.ones(3), iterations=2, **MAPS)


def test_control_right_inputs_are_taken() -> None:
    """What the refused calls are changed from."""
    pre_bwd(INPUT, POST, COMB)()
    back(SLOTS)()
    windows(ints(1, 2), ints(0, 0), TABLE, 16)()
    windows(ints(2), ints(0), TABLE - 1, 16)()  # closes no window, so no page is needed
    sparse_attention_fp8(Q, CACHE, SLOTS, extra=(CACHE, SLOTS), scale=0.1, **REF)
    packed_windows(torch.tensor([0, 4, 4, 9]), WINDOW)
    packed_windows(torch.tensor([0]), WINDOW)


def test_compress_takes_an_empty_state() -> None:
    """Entries that name nothing are zeros, also where no token has left anything yet."""
    rope = RopeParameters(head_dim=128, rotary_dim=64, theta=1e4, max_position=32)
    none = torch.full((2, 8), -1, dtype=torch.int32)
    entries = compress(
        torch.zeros(0, 512), none, ints(0, 4), torch.ones(128), rope=rope, params=WINDOW, **REF
    )
    assert entries.shape == (2, 128)
    assert not bool(entries.any())
