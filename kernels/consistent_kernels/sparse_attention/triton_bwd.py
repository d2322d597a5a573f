"""Backward of sparse attention in Triton, without atomics.

Per chunk of queries: one kernel for grad_q; one that writes the gradient of every (query, column)
pair to a buffer; one that adds, for each entry, the pairs that name it in ascending order. The
order does not depend on the size of a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned
from consistent_kernels.sparse_attention.backward import delta_of, grad_of_sinks, lse_with_sink
from consistent_kernels.sparse_attention.reference import padded_indices
from consistent_kernels.sparse_attention.spec import (
    BACKWARD_TILE,
    BLOCK_HEADS,
    NUM_STAGES,
    NUM_WARPS,
)
from consistent_kernels.sparse_attention.triton import check_widths, entry_rows, token_rows

BUFFER_BYTES = 256 << 20
"""Gradients of (query, column) pairs held at once."""

SUM_BLOCK = 128
SUM_WARPS = 1


@triton.jit
def _load_entries(kv_ptr, indices_ptr, at, entries, kv_stride, DV: tl.constexpr, DR: tl.constexpr):
    """Return (value part, rotary part or the value part again, valid) of a tile of columns."""
    index = tl.load(indices_ptr + at)
    valid = (index >= 0) & (index < entries)
    rows = tl.multiple_of(tl.where(valid, index, 0).to(tl.int64) * kv_stride, 8)
    columns = rows[:, None] + tl.arange(0, DV)[None, :]
    kv = tl.load(kv_ptr + columns, mask=valid[:, None], other=0.0)
    rope = kv
    if DR > 0:
        columns = rows[:, None] + (DV + tl.arange(0, DR))[None, :]
        rope = tl.load(kv_ptr + columns, mask=valid[:, None], other=0.0)
    return kv, rope, valid


@triton.jit
def _load_heads(
    q_ptr, grad_ptr, lse, token, heads, is_head, H: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr
):
    """Return (q value part, q rotary part or the value part again, grad_out) of some heads.

    A query that names nothing, of lse +inf, has grad_out 0, whatever padding holds.
    """
    at = token * H + heads
    value = tl.arange(0, DV)
    q = tl.load(q_ptr + at[:, None] * (DV + DR) + value[None, :], mask=is_head[:, None], other=0.0)
    rope = q
    if DR > 0:
        columns = at[:, None] * (DV + DR) + (DV + tl.arange(0, DR))[None, :]
        rope = tl.load(q_ptr + columns, mask=is_head[:, None], other=0.0)
    named = is_head & (lse != float("inf"))
    grad = tl.load(grad_ptr + at[:, None] * DV + value[None, :], mask=named[:, None], other=0.0)
    return q, rope, grad


@triton.jit
def _p_and_ds(q, q_rope, grad, kv, kv_rope, valid, lse, delta, scale, DR: tl.constexpr):
    """Return (P, dS), fp32 [heads, entries]; zero where an index names nothing."""
    scores = tl.dot(q, kv.T)
    if DR > 0:
        scores = tl.dot(q_rope, kv_rope.T, scores)
    p = tl.where(valid[None, :], tl.exp(scores * scale - lse[:, None]), 0.0)
    return p, p * (tl.dot(grad, kv.T) - delta[:, None]) * scale


@triton.jit(do_not_specialize=["scale", "entries", "columns", "kv_stride", "first"])
def _sparse_attention_bwd_q_kernel(
    q_ptr,  # [T, H, DV + DR] contiguous
    kv_ptr,  # [S, DV + DR], row stride kv_stride
    indices_ptr,  # [T, columns] int32 contiguous
    grad_ptr,  # [T, H, DV] contiguous
    lse_ptr,  # [T, H] fp32, with the sink
    delta_ptr,  # [T, H] fp32
    grad_q_ptr,  # [T, H, DV + DR] contiguous
    scale,
    entries,
    columns,
    kv_stride,
    first,
    H: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILE: tl.constexpr,
):
    token = (first + tl.program_id(0)).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < H
    lse = tl.load(lse_ptr + token * H + heads, mask=is_head, other=float("inf"))
    delta = tl.load(delta_ptr + token * H + heads, mask=is_head, other=0.0)
    q, q_rope, grad = _load_heads(q_ptr, grad_ptr, lse, token, heads, is_head, H, DV, DR)
    acc = tl.zeros((BLOCK_H, DV), tl.float32)
    acc_rope = tl.zeros((BLOCK_H, DR if DR > 0 else 16), tl.float32)
    for start in range(0, columns, TILE):
        at = token * columns + start + tl.arange(0, TILE)
        kv, kv_rope, valid = _load_entries(kv_ptr, indices_ptr, at, entries, kv_stride, DV, DR)
        _, ds = _p_and_ds(q, q_rope, grad, kv, kv_rope, valid, lse, delta, scale, DR)
        rounded = ds.to(kv.dtype)
        acc = tl.dot(rounded, kv, acc)
        if DR > 0:
            acc_rope = tl.dot(rounded, kv_rope, acc_rope)
    row = (token * H + heads)[:, None] * (DV + DR)
    dtype = grad_q_ptr.dtype.element_ty
    place = grad_q_ptr + row + tl.arange(0, DV)[None, :]
    tl.store(place, acc.to(dtype), mask=is_head[:, None])
    if DR > 0:
        place = grad_q_ptr + row + (DV + tl.arange(0, DR))[None, :]
        tl.store(place, acc_rope.to(dtype), mask=is_head[:, None])


@triton.jit(do_not_specialize=["scale", "entries", "columns", "kv_stride", "first"])
def _sparse_attention_bwd_pairs_kernel(
    q_ptr,
    kv_ptr,
    indices_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    pairs_ptr,  # [chunk, columns, DV + DR] fp32
    scale,
    entries,
    columns,
    kv_stride,
    first,
    H: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILE: tl.constexpr,
):
    token = (first + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    kv, kv_rope, valid = _load_entries(
        kv_ptr, indices_ptr, token * columns + column, entries, kv_stride, DV, DR
    )
    acc = tl.zeros((TILE, DV), tl.float32)
    acc_rope = tl.zeros((TILE, DR if DR > 0 else 16), tl.float32)
    for start in range(0, H, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)
        is_head = heads < H
        lse = tl.load(lse_ptr + token * H + heads, mask=is_head, other=float("inf"))
        delta = tl.load(delta_ptr + token * H + heads, mask=is_head, other=0.0)
        q, q_rope, grad = _load_heads(q_ptr, grad_ptr, lse, token, heads, is_head, H, DV, DR)
        p, ds = _p_and_ds(q, q_rope, grad, kv, kv_rope, valid, lse, delta, scale, DR)
        turned = tl.trans(ds.to(q.dtype))
        acc = tl.dot(tl.trans(p.to(q.dtype)), grad, acc)
        acc = tl.dot(turned, q, acc)
        if DR > 0:
            acc_rope = tl.dot(turned, q_rope, acc_rope)
    row = (tl.program_id(0).to(tl.int64) * columns + column)[:, None] * (DV + DR)
    tl.store(pairs_ptr + row + tl.arange(0, DV)[None, :], acc)
    if DR > 0:
        tl.store(pairs_ptr + row + (DV + tl.arange(0, DR))[None, :], acc_rope)


# A sum in one order has the same bits in every form, so this kernel may specialize.
@triton.jit
def _add_pairs_kernel(
    grad_ptr,  # [S, WIDTH] fp32
    pairs_ptr,  # [pairs, WIDTH] fp32
    order_ptr,  # [pairs] int64: pairs sorted by entry, ascending among equals
    bounds_ptr,  # [S + 1] int64: where an entry's pairs begin in `order`
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    begin, end = tl.load(bounds_ptr + entry), tl.load(bounds_ptr + entry + 1)
    if begin < end:
        place = grad_ptr + entry * WIDTH + columns
        total = tl.load(place, mask=inside, other=0.0)
        for at in range(begin, end):
            pair = tl.load(order_ptr + at)
            total += tl.load(pairs_ptr + pair * WIDTH + columns, mask=inside, other=0.0)
        tl.store(place, total, mask=inside)


def add_pairs(grad: torch.Tensor, pairs: torch.Tensor, indices: torch.Tensor) -> None:
    """grad[indices[i]] += pairs[i], i ascending, for the indices inside grad; no atomics.

    Args:
        grad: [S, W] fp32 contiguous; pairs: [n, W] fp32 contiguous; indices: [n] int32.
    """
    entries, width = grad.shape
    ordered, order = torch.sort(indices, stable=True)
    limits = torch.arange(entries + 1, dtype=indices.dtype, device=indices.device)
    bounds = torch.searchsorted(ordered, limits)
    _add_pairs_kernel[(entries, triton.cdiv(width, SUM_BLOCK))](
        grad, pairs, order, bounds, WIDTH=width, BLOCK=SUM_BLOCK, num_warps=SUM_WARPS
    )


def sparse_attention_bwd_triton(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Launch the kernels; arguments and result as `sparse_attention_bwd_ref`.

    P and dS are rounded to the dtype of q before the products with q, kv and grad_out.
    """
    tokens, heads, width = q.shape
    d_v = out.shape[2]
    rope = check_widths("sparse_attention_bwd", width, d_v)
    delta = delta_of(grad_out, out, lse)
    total = lse_with_sink(lse, sinks)
    grad_q = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    grad_kv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    columns = padded_indices(indices, BACKWARD_TILE).contiguous()
    count = columns.shape[1]
    step = max(1, BUFFER_BYTES // (4 * count * width))
    pairs = torch.empty((min(step, tokens), count, width), dtype=torch.float32, device=q.device)
    queries, rows = token_rows(q).contiguous(), entry_rows(kv)
    grad = token_rows(grad_out).contiguous()
    shared = (
        queries,
        rows,
        columns,
        grad,
        aligned(total.contiguous()),
        aligned(delta.contiguous()),
    )
    sizes = {"H": heads, "DV": d_v, "DR": rope, "BLOCK_H": BLOCK_HEADS, "TILE": BACKWARD_TILE}
    launch = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES}
    for first in range(0, tokens, step):
        here = min(step, tokens - first)
        numbers = (scale, kv.shape[0], count, rows.stride(0), first)
        _sparse_attention_bwd_q_kernel[(here, triton.cdiv(heads, BLOCK_HEADS))](
            *shared, grad_q, *numbers, **sizes, **launch
        )
        _sparse_attention_bwd_pairs_kernel[(here, count // BACKWARD_TILE)](
            *shared, pairs, *numbers, **sizes, **launch
        )
        named = columns[first : first + here].reshape(-1)
        add_pairs(grad_kv, pairs.view(-1, width), named)
    return grad_q, grad_kv.to(kv.dtype), grad_of_sinks(delta, total, sinks)
