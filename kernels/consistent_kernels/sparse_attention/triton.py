"""Sparse attention in Triton: one program a query and 32 heads, tiles of 64 columns ascending.

An entry is a value part of DV columns and, in V3.2, a rotary part of DR more that only scores see.
Both are powers of two. Reductions over a tile use `tl.max` and a written-down tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned
from consistent_kernels.devices import require_cuda
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.sparse_attention.reference import padded_indices
from consistent_kernels.sparse_attention.spec import (
    BLOCK_HEADS,
    ENTRY_TILE,
    NUM_STAGES,
    NUM_WARPS,
)
from consistent_kernels.triton_tree import halving_tree_columns

LOWEST = tl.constexpr(-3.4028234663852886e38)
ALIGN = 8
"""Elements: a multiple of 16 bytes, which row strides are declared to be."""


@triton.jit
def _scores(q, q_rope_ptr, q_mask, kv, kv_rope_ptr, kv_mask, DR: tl.constexpr):
    """q k^T in fp32: the value part, then the rotary part into the same accumulator."""
    scores = tl.dot(q, kv.T)
    if DR > 0:
        q_rope = tl.load(q_rope_ptr, mask=q_mask, other=0.0)
        kv_rope = tl.load(kv_rope_ptr, mask=kv_mask, other=0.0)
        scores = tl.dot(q_rope, kv_rope.T, scores)
    return scores


@triton.jit(do_not_specialize=["scale", "entries", "columns", "q_stride", "kv_stride"])
def _sparse_attention_fwd_kernel(
    q_ptr,  # [T, H, DV + DR], token stride q_stride
    kv_ptr,  # [S, DV + DR], row stride kv_stride
    indices_ptr,  # [T, columns] int32 contiguous, columns a multiple of TILE
    sink_ptr,  # [H] fp32 or unused
    out_ptr,  # [T, H, DV] contiguous
    lse_ptr,  # [T, H] fp32
    scale,
    entries,
    columns,
    q_stride,
    kv_stride,
    H: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILE: tl.constexpr,
    TILE_LEVELS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < H
    value = tl.arange(0, DV)
    rope = tl.arange(0, DR if DR > 0 else 16)
    q_rows = tl.multiple_of(token * q_stride, 8) + heads * (DV + DR)
    q = tl.load(q_ptr + q_rows[:, None] + value[None, :], mask=is_head[:, None], other=0.0)
    q_rope_ptr = q_ptr + q_rows[:, None] + (DV + rope)[None, :]
    m = tl.full((BLOCK_H,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, DV), tl.float32)
    for start in range(0, columns, TILE):
        index = tl.load(indices_ptr + token * columns + start + tl.arange(0, TILE))
        valid = (index >= 0) & (index < entries)
        rows = tl.multiple_of(tl.where(valid, index, 0).to(tl.int64) * kv_stride, 8)
        kv = tl.load(kv_ptr + rows[:, None] + value[None, :], mask=valid[:, None], other=0.0)
        kv_rope_ptr = kv_ptr + rows[:, None] + (DV + rope)[None, :]
        scores = _scores(q, q_rope_ptr, is_head[:, None], kv, kv_rope_ptr, valid[:, None], DR)
        scores = tl.where(valid[None, :], scores * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp(scores - m_new[:, None])
        rescale = tl.exp(m - m_new)
        total = total * rescale + halving_tree_columns(p, BLOCK_H, TILE, TILE_LEVELS)
        acc = tl.dot(p.to(kv.dtype), kv, acc * rescale[:, None])
        m = m_new
    seen = total > 0
    divisor = total
    if HAS_SINK:
        sink = tl.load(sink_ptr + heads, mask=is_head, other=float("-inf"))
        divisor = total + tl.exp(sink - m)
    divisor = tl.where(seen, divisor, 1.0)
    # + 0.0: the sign of an exact zero would follow columns that name nothing.
    out = tl.div_rn(acc, tl.broadcast_to(divisor[:, None], (BLOCK_H, DV))) + 0.0
    at = token * H + heads
    tl.store(
        out_ptr + at[:, None] * DV + value[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_head[:, None],
    )
    lse = tl.where(seen, m + tl.log(tl.where(seen, total, 1.0)), float("inf"))
    tl.store(lse_ptr + at, lse, mask=is_head)


def check_widths(op: str, width: int, d_v: int) -> int:
    """Return the width of the rotary part.

    Raises:
        UnsupportedError: a part that is no power of two of at least 16 columns.
    """
    rope = width - d_v
    for size in (d_v, rope) if rope else (d_v,):
        if size < 16 or size & (size - 1):
            raise UnsupportedError(
                op,
                f"width {width} with d_v {d_v} by impl 'triton'",
                ["a power of two of at least 16, and the same or nothing beyond d_v"],
            )
    return rope


def token_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, H, D] with packed heads and 16-byte aligned tokens."""
    packed = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % ALIGN == 0
    return (
        x if packed and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    )


def entry_rows(kv: torch.Tensor) -> torch.Tensor:
    """Return kv [S, D] with unit column stride and 16-byte aligned rows."""
    packed = kv.stride(1) == 1 and kv.stride(0) % ALIGN == 0
    if packed and kv.data_ptr() % 16 == 0:
        return kv
    return kv.clone(memory_format=torch.contiguous_format)


def sparse_attention_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; see `sparse_attention`."""
    tokens, heads, width = q.shape
    rope = check_widths("sparse_attention", width, d_v)
    require_cuda("sparse_attention", "triton", q)
    out = torch.empty((tokens, heads, d_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    queries, rows = token_rows(q), entry_rows(kv)
    columns = aligned(padded_indices(indices, ENTRY_TILE).contiguous())
    _sparse_attention_fwd_kernel[(tokens, triton.cdiv(heads, BLOCK_HEADS))](
        queries, rows, columns, lse if sinks is None else aligned(sinks.contiguous()), out, lse,
        scale, kv.shape[0], columns.shape[1], queries.stride(0), rows.stride(0),
        H=heads, DV=d_v, DR=rope, HAS_SINK=sinks is not None, BLOCK_H=BLOCK_HEADS,
        TILE=ENTRY_TILE, TILE_LEVELS=ENTRY_TILE.bit_length() - 1,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out, lse
