"""Attention in plain PyTorch: the readable form of the spec, and the CPU program.

Every GEMM is a batch of [R, D] x [D, 64] or [R, 64] x [64, D] with R fixed by the heads, so a row's
bits cannot depend on the batch, the phase or the lengths; see `plan.py`.
"""

from __future__ import annotations

import torch

from consistent_kernels.attention.parameters import AttentionParameters
from consistent_kernels.attention.plan import AttentionPlan, SplitStart, TileGroup, tile_rows
from consistent_kernels.attention.spec import KEY_TILE, TILE_ROWS, query_slots

LOWEST = torch.finfo(torch.float32).min
"""Running maximum before the first key: finite, so that no inf - inf arises."""


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # MKL threads a lone matrix from inside, with other kernels: a batch has at least two.
    if a.shape[0] == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)


def _query_tiles(q: torch.Tensor, group: TileGroup, params: AttentionParameters) -> torch.Tensor:
    """Return q as fp32 [tiles, Hk, R, D]; rows are slot * group + head."""
    slots = query_slots(params.group, TILE_ROWS)
    heads, width = params.num_kv_heads, params.head_dim
    rows = q.index_select(0, group.query_rows).view(-1, slots, heads, params.group, width)
    count = tile_rows(params)
    tiles = torch.empty(rows.shape[0], heads, count, width)
    filled = slots * params.group
    tiles[:, :, :filled].view(-1, heads, slots, params.group, width).copy_(
        rows.permute(0, 2, 1, 3, 4)
    )
    if filled < count:
        tiles[:, :, filled:] = 0.0
    return tiles


def _key_tiles(rows: torch.Tensor, group: TileGroup, params: AttentionParameters) -> torch.Tensor:
    """Gather keys or values as fp32 [pairs * Hk, 64, D]."""
    heads, width = params.num_kv_heads, params.head_dim
    gathered = rows.index_select(0, group.key_rows).view(-1, KEY_TILE, heads, width)
    tiles = torch.empty(gathered.shape[0], heads, KEY_TILE, width)
    return tiles.copy_(gathered.transpose(1, 2)).view(-1, KEY_TILE, width)


class _Totals:
    """Merged splits of some query tiles: maximum, row sum, unnormalized output."""

    def __init__(self, tiles: int, acc: torch.Tensor) -> None:
        self.m = torch.empty(tiles, *acc.shape[1:3])
        self.row_sum = torch.empty_like(self.m)
        self.acc = torch.empty(tiles, *acc.shape[1:])

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


def _running_maximum(
    peak: torch.Tensor, active: list[int], starts: list[SplitStart | None]
) -> torch.Tensor | None:
    """Turn per-pair maxima [P, Hk, R] into running ones, in place; return the rescale factors.

    Returns:
        exp(previous running maximum - running maximum) for the pairs of step 1 and later.
    """
    peak.clamp_min_(LOWEST)
    if len(active) == 1:
        return None
    first = active[0]
    factor = torch.empty(peak.shape[0] - first, *peak.shape[1:])
    begin, before = first, 0
    for step in range(1, len(active)):
        count = active[step]
        previous, current = peak[before : before + count], peak[begin : begin + count]
        start = starts[step]
        if start is not None:
            previous = previous.clone()
            previous[start.tiles] = LOWEST
        torch.maximum(previous, current, out=current)
        torch.sub(previous, current, out=factor[begin - first : begin - first + count])
        before, begin = begin, begin + count
    return factor.exp_()


def _attend(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    group: TileGroup,
    params: AttentionParameters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fp32 (out [tiles, Hk, R, D], lse [tiles, Hk, R]) of a group of query tiles."""
    heads, rows = params.num_kv_heads, tile_rows(params)
    pairs = group.pair_tile.numel()
    queries = _query_tiles(q, group, params)
    by_pair = queries.index_select(0, group.pair_tile).view(-1, rows, params.head_dim)
    scores = _bmm(by_pair, _key_tiles(k_rows, group, params).transpose(1, 2))
    scores = scores.view(pairs, heads, rows * KEY_TILE)
    torch.add(group.bias, scores, alpha=params.scale, out=scores)
    scores = scores.view(pairs, heads, rows, KEY_TILE)

    peak = scores.amax(-1)
    factor = _running_maximum(peak, group.active, group.split_starts)
    p = scores.sub_(peak[..., None]).exp_()
    sums = p.sum(-1)
    rounded = p if q.dtype == torch.float32 else p.to(q.dtype).float()
    weighted = _bmm(rounded.view(-1, rows, KEY_TILE), _key_tiles(v_rows, group, params))
    weighted = weighted.view(pairs, heads, rows, params.head_dim)

    first = group.active[0]
    row_sum, acc = sums[:first], weighted[:first]
    totals = _Totals(first, acc) if group.split_tiles is not None else None
    begin, before = first, 0
    for step in range(1, len(group.active)):
        count = group.active[step]
        start = group.split_starts[step]
        if start is not None and totals is not None:
            m = peak[before : before + count]
            totals.put(start.fresh, m, row_sum, acc)
            totals.merge(start.merge, m, row_sum, acc)
        rescale = factor[begin - first : begin - first + count]
        row_sum[:count].mul_(rescale).add_(sums[begin : begin + count])
        acc[:count].mul_(rescale[..., None]).add_(weighted[begin : begin + count])
        before, begin = begin, begin + count
    m = peak.index_select(0, group.last_pair)
    if totals is not None:
        index = group.split_tiles
        totals.merge(index, m, row_sum, acc)
        m[index], row_sum[index], acc[index] = (
            totals.m[index],
            totals.row_sum[index],
            totals.acc[index],
        )
    # + 0.0: the sign of an exact zero would follow keys that the row does not see.
    return acc.div_(row_sum[..., None]).add_(0.0), row_sum.log_().add_(m)


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
    slots = query_slots(params.group, TILE_ROWS)
    shape = (plan.num_tokens, params.num_heads)
    if plan.covered:
        out = torch.empty(*shape, params.head_dim, dtype=q.dtype)
        lse = torch.empty(shape)
    else:
        out = torch.zeros(*shape, params.head_dim, dtype=q.dtype)
        lse = torch.full(shape, float("-inf"))
    filled = slots * params.group
    for group in plan.groups:
        acc, sums = _attend(q, k_rows, v_rows, group, params)
        split = (-1, params.num_kv_heads, slots, params.group)
        acc = acc[:, :, :filled].unflatten(2, split[2:]).transpose(1, 2)
        sums = sums[:, :, :filled].reshape(split).transpose(1, 2)
        acc = acc.reshape(-1, params.num_heads, params.head_dim)
        out.index_copy_(0, group.out_rows, acc.index_select(0, group.out_slots).to(q.dtype))
        sums = sums.reshape(-1, params.num_heads)
        lse.index_copy_(0, group.out_rows, sums.index_select(0, group.out_slots))
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
