"""Attention in plain PyTorch: the readable form of the spec, and the CPU program.

Every GEMM is a batch of [R, D] x [D, 64] or [R, 64] x [64, D] with R fixed by the heads, so a row's
bits cannot depend on the batch, the phase or the lengths; see `plan.py`.
"""

from __future__ import annotations

import functools
import importlib
import math
import threading
from typing import Any

import torch

from consistent_kernels.attention.parameters import AttentionParameters
from consistent_kernels.attention.plan import AttentionPlan, TileGroup
from consistent_kernels.attention.spec import KEY_TILE
from consistent_kernels.cpu_gemm import plain_gemms

LOWEST = torch.finfo(torch.float32).min
"""Running maximum before the first key: finite, so that no inf - inf arises."""


_POOL = threading.local()


def _scratch(
    group: TileGroup, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return an uninitialized tensor that the next call with this name in this thread reuses.

    Fresh memory of this size costs page faults that outweigh the arithmetic.
    """
    cached = group.buffers.get(name)
    if cached is not None and cached.dtype == dtype:
        return cached
    size = math.prod(shape)
    # An engine under inference_mode and a trainer may share the process, and so this memory.
    with torch.inference_mode(False):
        buffer = getattr(_POOL, name, None)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = torch.empty(size, dtype=dtype)
            setattr(_POOL, name, buffer)
        group.buffers[name] = buffer[:size].view(shape)
    return group.buffers[name]


def _bmm(a: torch.Tensor, b: torch.Tensor, name: str, group: TileGroup) -> torch.Tensor:
    with plain_gemms():
        # MKL threads a lone matrix from inside, with other kernels: a batch has at least two.
        if a.shape[0] == 1:
            return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
        return torch.bmm(a, b, out=_scratch(group, name, (a.shape[0], a.shape[1], b.shape[2])))


@functools.cache
def _loops_module() -> Any:
    # Numba comes with vLLM; without it (or a place for its cache) keys are moved by two PyTorch
    # calls instead of one loop.
    try:
        return importlib.import_module("consistent_kernels.attention.loops")
    except (ImportError, RuntimeError):
        return None


def _query_tiles(q: torch.Tensor, group: TileGroup, params: AttentionParameters) -> torch.Tensor:
    """Gather queries as fp32 [pairs * Hk, R, D]; one GEMM tile a pair and key head."""
    gathered = q.reshape(-1, params.head_dim).index_select(0, group.query_index)
    return gathered.float().view(-1, group.rows, params.head_dim)


def _key_tiles(rows: torch.Tensor, group: TileGroup, params: AttentionParameters) -> torch.Tensor:
    """Gather keys, then values, as fp32 [pairs * Hk, 64, D]; both share their memory."""
    heads, width = params.num_kv_heads, params.head_dim
    tiles = _scratch(group, "tiles", (group.bias.shape[0], heads, KEY_TILE, width))
    loops = _loops_module()
    if loops is not None and loops.gather_tiles(rows, group.key_rows, tiles):
        return tiles.view(-1, KEY_TILE, width)
    gathered = _scratch(group, "rows", (group.key_rows.numel(), heads, width), rows.dtype)
    torch.index_select(rows, 0, group.key_rows, out=gathered)
    tiles.copy_(gathered.view(-1, KEY_TILE, heads, width).transpose(1, 2))
    return tiles.view(-1, KEY_TILE, width)


class _Totals:
    """Merged splits of some query tiles: maximum, row sum, unnormalized output."""

    def __init__(self, tiles: int, acc: torch.Tensor) -> None:
        self.m = torch.empty(tiles, *acc.shape[1:3], dtype=torch.float32)
        self.row_sum = torch.empty_like(self.m)
        self.acc = torch.empty(tiles, *acc.shape[1:], dtype=torch.float32)

    def put(
        self, index: torch.Tensor, m: torch.Tensor, row_sum: torch.Tensor, acc: torch.Tensor
    ) -> None:
        """Start with the first split; m, row_sum, acc hold all query tiles."""
        self.m[index], self.row_sum[index], self.acc[index] = m[index], row_sum[index], acc[index]

    def merge(
        self, index: torch.Tensor, m: torch.Tensor, row_sum: torch.Tensor, acc: torch.Tensor
    ) -> None:
        """Add the next split, ascending."""
        highest = torch.maximum(self.m[index], m[index])
        ours, theirs = torch.exp(self.m[index] - highest), torch.exp(m[index] - highest)
        self.row_sum[index] = self.row_sum[index] * ours + row_sum[index] * theirs
        self.acc[index] = self.acc[index] * ours[..., None] + acc[index] * theirs[..., None]
        self.m[index] = highest


def _running_maximum(peak: torch.Tensor, group: TileGroup) -> tuple[torch.Tensor, ...]:
    """Turn per-pair maxima [P, Hk, R] into running ones, in place.

    Returns:
        exp(previous running maximum - running maximum) of step 1, 2, ...
    """
    peak.clamp_min_(LOWEST)
    active = group.active
    if len(active) == 1:
        return ()
    peaks = peak.split(active)
    factor = torch.empty(peak.shape[0] - active[0], *peak.shape[1:], dtype=torch.float32)
    factors = factor.split(active[1:])
    for step in range(1, len(active)):
        previous = peaks[step - 1]
        if active[step] < active[step - 1]:
            previous = previous[: active[step]]
        start = group.split_starts[step]
        if start is not None:
            previous = previous.clone()
            previous[start.tiles] = LOWEST
        torch.maximum(previous, peaks[step], out=peaks[step])
        torch.sub(previous, peaks[step], out=factors[step - 1])
    factor.exp_()
    return factors


def _combine(
    peak: torch.Tensor,
    factors: tuple[torch.Tensor, ...],
    sums: torch.Tensor,
    weighted: torch.Tensor,
    group: TileGroup,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the steps of each query tile in ascending order, splits apart, then merge the splits.

    Args:
        peak, sums: [P, Hk, R] running maxima and row sums; weighted: [P, Hk, R, D] P V.

    Returns:
        (maximum [tiles, Hk, R], row sum [tiles, Hk, R], unnormalized output [tiles, Hk, R, D]).
    """
    active = group.active
    if len(active) == 1:
        return peak, sums, weighted
    sums_of, weighted_of = sums.split(active), weighted.split(active)
    row_sum, acc = sums_of[0], weighted_of[0]
    totals = _Totals(active[0], acc) if group.split_tiles is not None else None
    begin = 0
    for step in range(1, len(active)):
        count = active[step]
        start = group.split_starts[step]
        if start is not None and totals is not None:
            m = peak[begin:]
            totals.put(start.fresh, m, row_sum, acc)
            totals.merge(start.merge, m, row_sum, acc)
        begin += active[step - 1]
        row_sum_now, acc_now = row_sum, acc
        if count < active[0]:
            row_sum_now, acc_now = row_sum[:count], acc[:count]
        row_sum_now.mul_(factors[step - 1]).add_(sums_of[step])
        acc_now.mul_(factors[step - 1].unsqueeze(-1)).add_(weighted_of[step])
    m = peak.index_select(0, group.last_pair)
    if totals is not None:
        index = group.split_tiles
        totals.merge(index, m, row_sum, acc)
        m[index], row_sum[index] = totals.m[index], totals.row_sum[index]
        acc[index] = totals.acc[index]
    return m, row_sum, acc


def _attend(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    group: TileGroup,
    params: AttentionParameters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fp32 (out [n * Hq, D], lse [n * Hq]) of a group of query tiles."""
    heads, rows = params.num_kv_heads, group.rows
    queries = _query_tiles(q, group, params)
    scores = _bmm(queries, _key_tiles(k_rows, group, params).transpose(1, 2), "scores", group)
    flat = scores.view(-1, heads, rows * KEY_TILE)
    torch.add(group.bias, flat, alpha=params.scale, out=flat)
    p = scores.view(-1, heads, rows, KEY_TILE)
    peak = p.amax(-1)
    factors = _running_maximum(peak, group)
    p.sub_(peak.unsqueeze(-1)).exp_()
    sums = p.sum(-1)
    if q.dtype != torch.float32:
        p.copy_(_scratch(group, "rounded", p.shape, q.dtype).copy_(p))
    values = _key_tiles(v_rows, group, params)
    weighted = _bmm(p.view(-1, rows, KEY_TILE), values, "weighted", group)
    weighted = weighted.view(-1, heads, rows, params.head_dim)
    m, row_sum, acc = _combine(peak, factors, sums, weighted, group)
    m, row_sum = (x.reshape(-1).index_select(0, group.out_index) for x in (m, row_sum))
    out = acc.view(-1, params.head_dim).index_select(0, group.out_index)
    # + 0.0: the sign of an exact zero would follow keys that the row does not see.
    return out.div_(row_sum.unsqueeze(1)).add_(0.0), row_sum.log_().add_(m)


def attention_ref(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v over the keys that each query sees.

    Args:
        q: [T, Hq, D].
        k_rows, v_rows: [rows, Hk, D], packed keys or the rows of all pages; the dtype of q, or
            fp32 holding the same values.
        plan: from `build_plan`.

    Returns:
        (out [T, Hq, D] in the dtype of q, lse [T, Hq] fp32).
    """
    params = plan.params
    shape = (plan.num_tokens, params.num_heads)
    if len(plan.groups) == 1 and plan.groups[0].out_rows is None:
        out, lse = _attend(q, k_rows, v_rows, plan.groups[0], params)
        return out.to(q.dtype).view(*shape, params.head_dim), lse.view(shape)
    out = torch.zeros(*shape, params.head_dim, dtype=q.dtype)
    lse = torch.full(shape, float("-inf"), dtype=torch.float32)
    for group in plan.groups:
        acc, sums = _attend(q, k_rows, v_rows, group, params)
        out.index_copy_(0, group.out_rows, acc.to(q.dtype).view(-1, *out.shape[1:]))
        lse.index_copy_(0, group.out_rows, sums.view(-1, params.num_heads))
    return out, lse


def write_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """k_rows[rows[t]] = k[t] and the same for v, where rows[t] >= 0.

    Args:
        k, v: [T, Hk, D]; k_rows, v_rows: [rows, Hk, D]; rows: [T] int64.
    """
    if bool((rows < 0).any()):
        kept = (rows >= 0).nonzero().view(-1)
        k, v, rows = k[kept], v[kept], rows[kept]
    k_rows.index_copy_(0, rows, k.to(k_rows.dtype))
    v_rows.index_copy_(0, rows, v.to(v_rows.dtype))


BACKWARD_BYTES = 24 << 20
"""FP32 scores held at once by the backward."""


def _visible(
    first_query: int,
    queries: int,
    first_key: int,
    keys: int,
    window: int | None,
    like: torch.Tensor,
) -> torch.Tensor:
    position = torch.arange(first_query, first_query + queries, device=like.device)[:, None]
    key = torch.arange(first_key, first_key + keys, device=like.device)
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


def _heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[n, Hq, D] -> fp32 [Hk, G * n, D]."""
    count, total, width = x.shape
    grouped = x.float().view(count, heads, total // heads, width).permute(1, 2, 0, 3)
    return grouped.reshape(heads, -1, width)


def _rows_first(x: torch.Tensor, count: int) -> torch.Tensor:
    """[Hk, G * n, D] -> [n, Hq, D]."""
    return x.unflatten(1, (-1, count)).flatten(0, 1).transpose(0, 1)


def attention_bwd_ref(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: list[tuple[int, int, int, int]],
    params: AttentionParameters,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of attention over packed keys, in fp32, on any device.

    With P = exp(scale q k^T - lse) and delta = sum(grad_out * out):
    grad_v = P^T grad_out; dS = P * (grad_out v^T - delta);
    grad_q = scale dS k; grad_k = scale dS^T q. The rounding of P is passed straight through.

    Args:
        grad_out, q, out: [T, Hq, D]; k, v: [Tk, Hk, D]; lse: [T, Hq] fp32.
        sequences: (first query row, queries, first key row, keys) of each sequence.

    Returns:
        (grad_q, grad_k, grad_v), each of the shape and dtype of its input.
    """
    heads, window = params.num_kv_heads, params.sliding_window
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_k = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    grad_v = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    delta = (grad_out.float() * out.float()).sum(-1, keepdim=True)
    for q_row, queries, k_row, keys in sequences:
        block = max(1, BACKWARD_BYTES // (4 * params.num_heads * keys))
        for begin in range(0, queries, block):
            count = min(block, queries - begin)
            position = keys - queries + begin
            low = 0 if window is None else max(0, position - window + 1)
            high = position + count
            rows = slice(q_row + begin, q_row + begin + count)
            columns = slice(k_row + low, k_row + high)
            q32, g32 = _heads_first(q[rows], heads), _heads_first(grad_out[rows], heads)
            k32, v32 = (x[columns].float().transpose(0, 1) for x in (k, v))
            p = torch.bmm(q32, k32.transpose(1, 2)).mul_(params.scale)
            p.sub_(_heads_first(lse[rows, :, None], heads)).exp_()
            hidden = ~_visible(position, count, low, high - low, window, q)
            p.unflatten(1, (-1, count)).masked_fill_(hidden, 0.0)
            grad_v[columns].transpose(0, 1).baddbmm_(p.transpose(1, 2), g32)
            ds = torch.bmm(g32, v32.transpose(1, 2)).sub_(_heads_first(delta[rows], heads))
            ds.mul_(p).mul_(params.scale)
            grad_q[rows] = _rows_first(torch.bmm(ds, k32), count).to(q.dtype)
            grad_k[columns].transpose(0, 1).baddbmm_(ds.transpose(1, 2), q32)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)
