"""Attention for x86 CPUs as one compiled loop over tiles of 64 keys, for all phases and layouts.

A unit of work is some queries of one sequence and one key head. Its keys and values are widened to
fp32 tile by tile; every row (a query and one of its heads) then takes the keys that it sees. Sums:
a dot product has 16 lanes, each ascending over columns 16 apart, and a halving tree over the lanes;
the sum of a tile's probabilities is a halving tree over its 64 places; P V ascends over keys.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from llvmlite import ir

from consistent_kernels.attention.plan import UNIT_ROWS, AttentionPlan
from consistent_kernels.attention.spec import KEY_TILE, PAGE_MULTIPLE
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.llvm import is_available
from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import F32, I32, I64, LANES, LOWEST, Kernel, Variable, floats

_NO_WINDOW = 1 << 40
_STATE = 2  # m and row sum
_ACCUMULATORS = 24  # vectors that P V may keep in registers


class Attention(Kernel):
    """The words of its command: see `command`."""

    def __init__(self, head_dim: int, group: int, bits: int | None = None) -> None:
        super().__init__("attention", bits)
        self.width, self.group = head_dim, group
        self.parts = head_dim // LANES
        b, rows = self.b, max(UNIT_ROWS, group)
        (self.items, count, self.q, self.q_stride, self.k, self.v, self.row_bytes) = self.words(
            1, 7
        )
        (self.starts, self.lengths, self.table, self.table_stride, self.block, self.block_rows) = (
            self.words(8, 6)
        )
        (self.heads, self.out, self.out_stride, self.stats, self.window, self.split, scale) = (
            self.words(14, 7)
        )
        self.scale = b.bitcast(b.trunc(scale, I32), F32)
        self.k_tile, self.v_tile = (self.scratch(KEY_TILE * head_dim) for _ in range(2))
        self.queries, self.sums, self.totals = (self.scratch(rows * head_dim) for _ in range(3))
        # (running maximum, row sum) of the split under way, and of the splits merged so far.
        self.state, self.merged = (self.scratch(rows * _STATE) for _ in range(2))
        # Of the heads of one query: scores, then probabilities; exp(old - new maximum).
        self.scores, self.factors = self.scratch(KEY_TILE * group), self.scratch(group)
        with self.work(b.mul(count, self.heads)) as unit:
            self._unit(unit)

    def _int(self, base: Any, index: Any) -> Any:
        return self.b.sext(self.load(self.scaled(base, index, 4), I32, 4), I64)

    def _part(self, base: Any, part: int) -> Any:
        return self.at(base, 4 * LANES * part)

    def _vectors(self, base: Any) -> list[Any]:
        return [self.load(self._part(base, i), floats(LANES), 4) for i in range(self.parts)]

    def _unit(self, unit: Any) -> None:
        b = self.b
        item = self.scaled(self.items, b.sdiv(unit, self.heads), 12)
        self.head = b.srem(unit, self.heads)
        sequence, first, count = (self._int(self.at(item, 4 * i), self.i64(0)) for i in range(3))
        begin = self._int(self.starts, sequence)
        queries = b.sub(self._int(self.starts, self.at(sequence, 1)), begin)
        length = self._int(self.lengths, sequence)
        self.pages = self.scaled(self.table, sequence, b.mul(self.table_stride, self.i64(4)))
        self.position = b.add(b.sub(length, queries), first)
        self.query = b.add(begin, first)
        self._start(count)
        last = b.add(self.position, b.sub(count, self.i64(1)))
        tile_of = functools.partial(b.sdiv, rhs=self.i64(KEY_TILE))
        start = tile_of(self._first_key(self.position))
        with self.loop(start, b.add(tile_of(last), self.i64(1))) as tile:
            key = b.mul(tile, self.i64(KEY_TILE))
            low = self._larger(b.sub(self._first_key(self.position), key), self.i64(0))
            high = self._smaller(b.sub(last, key), self.i64(KEY_TILE - 1))
            self._widen(key, low, high)
            with self.loop(0, count) as query:
                self._query(tile, key, query)
        with self.loop(0, b.mul(count, self.i64(self.group))) as row:
            self._finish(row)

    def _larger(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed(">", x, y), x, y)

    def _smaller(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def _first_key(self, position: Any) -> Any:
        return self._larger(self.b.add(self.b.sub(position, self.window), self.i64(1)), self.i64(0))

    def _start(self, count: Any) -> None:
        """Widen the queries; nothing is summed yet."""
        lowest, zero = ir.Constant(F32, LOWEST), ir.Constant(F32, 0.0)
        with self.loop(0, count) as query:
            row = self.b.mul(query, self.i64(self.group))
            source = self.scaled(self.q, self.b.add(self.query, query), self.q_stride)
            source = self.scaled(source, self.head, 2 * self.width * self.group)
            target = self.scaled(self.queries, row, 4 * self.width)
            with self.loop(0, self.parts * self.group) as part:
                x = self.load_bf16(self.scaled(source, part, 2 * LANES))
                self.store(x, self.scaled(target, part, 4 * LANES), 4)
            with self.loop(0, self.group) as head:
                self._clear(self.b.add(row, head))
                merged = self.scaled(self.merged, self.b.add(row, head), 4 * _STATE)
                self.store(lowest, merged, 4)
                # No row sum of a split is 0 or less: the largest probability is 1.
                self.store(zero, self.at(merged, 4), 4)

    def _clear(self, row: Any) -> None:
        state = self.scaled(self.state, row, 4 * _STATE)
        self.store(ir.Constant(F32, LOWEST), state, 4)
        self.store(ir.Constant(F32, 0.0), self.at(state, 4), 4)
        sums = self.scaled(self.sums, row, 4 * self.width)
        for part in range(self.parts):
            self.store(self.fill(0.0), self._part(sums, part), 4)

    def _widen(self, key: Any, low: Any, high: Any) -> None:
        """Keys low .. high of the tile, and their values, as fp32."""
        b = self.b
        run = self.i64(PAGE_MULTIPLE)
        with self.loop(b.sdiv(low, run), b.add(b.sdiv(high, run), self.i64(1))) as chunk:
            # So many keys from a multiple of that number lie in one page, one behind the other.
            begin = b.mul(chunk, run)
            position = b.add(key, begin)
            page = self._int(self.pages, b.sdiv(position, self.block))
            row = b.add(b.mul(page, self.block_rows), b.srem(position, self.block))
            offset = self.scaled(b.mul(row, self.row_bytes), self.head, 2 * self.width)
            first = self._larger(b.sub(low, begin), self.i64(0))
            stop = self._smaller(b.sub(high, begin), self.i64(PAGE_MULTIPLE - 1))
            with self.loop(first, b.add(stop, self.i64(1))) as place:
                shift = b.add(offset, b.mul(place, self.row_bytes))
                target = b.mul(b.add(begin, place), self.i64(4 * self.width))
                for rows, tile in ((self.k, self.k_tile), (self.v, self.v_tile)):
                    source, wide = b.add(rows, shift), b.add(tile, target)
                    for part in range(self.parts):
                        x = self.load_bf16(self.at(source, 2 * LANES * part))
                        self.store(x, self._part(wide, part), 4)

    def _query(self, tile: Any, key: Any, query: Any) -> None:
        """One tile for all heads of one query, where the query sees any of it."""
        b = self.b
        position = b.add(self.position, query)
        first = self._first_key(position)
        first_tile = b.sdiv(first, self.i64(KEY_TILE))
        sees = b.and_(b.icmp_signed("<=", key, position), b.icmp_signed(">=", tile, first_tile))
        with b.if_then(sees):
            low = self._larger(b.sub(first, key), self.i64(0))
            high = self._smaller(b.sub(position, key), self.i64(KEY_TILE - 1))
            at_split = b.icmp_signed("==", b.srem(tile, self.split), self.i64(0))
            begins = b.and_(at_split, b.icmp_signed(">", tile, first_tile))
            begin = b.mul(query, self.i64(self.group))
            with self.loop(0, self.group) as head:
                row = b.add(begin, head)
                with b.if_then(begins):
                    self._merge(row)
                    self._clear(row)
                self._probabilities(row, head, low, high)
            together = max(1, _ACCUMULATORS // self.parts)
            for first_head in range(0, self.group, together):
                heads = range(first_head, min(first_head + together, self.group))
                self._add_values(begin, heads, low, high)

    def _score_chunk(self, row: Any, scores_at: Any, chunk: Any, low: Any, high: Any) -> None:
        """16 scores; keys that the row does not see have -inf."""
        b = self.b
        queries = self._vectors(self.scaled(self.queries, row, 4 * self.width))
        keys = self.scaled(self.k_tile, chunk, 4 * self.width * LANES)
        dots = []
        for j in range(LANES):
            key = self._vectors(self.at(keys, 4 * self.width * j))
            total = b.fmul(queries[0], key[0])
            for x, y in zip(queries[1:], key[1:], strict=True):
                total = self.fma(x, y, total)
            dots.append(total)
        scores = b.fmul(self.sums_of(dots), self.splat(self.scale))
        lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
        place = b.add(lanes, self.splat(b.mul(chunk, self.i64(LANES))))
        seen = b.and_(
            b.icmp_signed(">=", place, self.splat(low)),
            b.icmp_signed("<=", place, self.splat(high)),
        )
        scores = b.select(seen, scores, self.fill(float("-inf")))
        self.store(scores, self.scaled(scores_at, chunk, 4 * LANES), 4)

    def _probabilities(self, row: Any, head: Any, low: Any, high: Any) -> None:
        """exp(score - running maximum) of a tile, rounded; maximum and row sum go on."""
        b = self.b
        scores_at = self.scaled(self.scores, head, 4 * KEY_TILE)
        for part in range(KEY_TILE // LANES):
            self.store(self.fill(float("-inf")), self._part(scores_at, part), 4)
        first, last = (b.sdiv(x, self.i64(LANES)) for x in (low, high))
        with self.loop(first, b.add(last, self.i64(1))) as chunk:
            self._score_chunk(row, scores_at, chunk, low, high)
        scores = [
            self.load(self._part(scores_at, i), floats(LANES), 4) for i in range(KEY_TILE // LANES)
        ]
        state = self.scaled(self.state, row, 4 * _STATE)
        before = self.load(state, F32, 4)
        peak = self.maximum(self.maximum(scores[0], scores[2]), self.maximum(scores[1], scores[3]))
        now = self.maximum(self.tree(peak, self.maximum), before)
        self.store(now, state, 4)
        factor = self.exp(self.splat(b.fsub(before, now)))
        p = [self.exp(b.fsub(x, self.splat(now))) for x in scores]
        total = self.sum(b.fadd(b.fadd(p[0], p[2]), b.fadd(p[1], p[3])))
        scale = b.extract_element(factor, ir.Constant(I32, 0))
        self.store(scale, self.scaled(self.factors, head, 4), 4)
        place = self.at(state, 4)
        self.store(self.fma(self.load(place, F32, 4), scale, total), place, 4)
        for i, x in enumerate(p):
            self.store(self.rounded(x), self._part(scores_at, i), 4)

    def _add_values(self, begin: Any, heads: range, low: Any, high: Any) -> None:
        """P V of a tile, ascending over keys, behind what the heads have so far."""
        weighted = {
            (head, part): Variable(self, floats(LANES))
            for head in heads
            for part in range(self.parts)
        }
        for each in weighted.values():
            each.set(self.fill(0.0))
        with self.loop(low, self.b.add(high, self.i64(1))) as j:
            values = self._vectors(self.scaled(self.v_tile, j, 4 * self.width))
            place = self.scaled(self.scores, j, 4)
            for head in heads:
                weight = self.splat(self.load(self.at(place, 4 * KEY_TILE * head), F32, 4))
                for part, value in enumerate(values):
                    total = weighted[head, part]
                    total.set(self.fma(weight, value, total.get()))
        for head in heads:
            row = self.b.add(begin, self.i64(head))
            sums = self.scaled(self.sums, row, 4 * self.width)
            factor = self.splat(self.load(self.at(self.factors, 4 * head), F32, 4))
            for part, old in enumerate(self._vectors(sums)):
                value = self.fma(old, factor, weighted[head, part].get())
                self.store(value, self._part(sums, part), 4)

    def _merge(self, row: Any) -> None:
        """Add the split under way to those before it, or put it down as the first."""
        b = self.b
        state = self.scaled(self.state, row, 4 * _STATE)
        merged = self.scaled(self.merged, row, 4 * _STATE)
        m, row_sum = (self.load(self.at(state, 4 * i), F32, 4) for i in range(2))
        old_m, old_sum = (self.load(self.at(merged, 4 * i), F32, 4) for i in range(2))
        sums = self.scaled(self.sums, row, 4 * self.width)
        totals = self.scaled(self.totals, row, 4 * self.width)
        is_first = b.fcmp_ordered("oeq", old_sum, ir.Constant(F32, 0.0))
        with b.if_else(is_first) as (put, add):
            with put:
                self.store(m, merged, 4)
                self.store(row_sum, self.at(merged, 4), 4)
                for part, x in enumerate(self._vectors(sums)):
                    self.store(x, self._part(totals, part), 4)
            with add:
                highest = self.maximum(old_m, m)
                ours = self.exp(self.splat(b.fsub(old_m, highest)))
                theirs = self.exp(self.splat(b.fsub(m, highest)))
                self.store(highest, merged, 4)
                zero = ir.Constant(I32, 0)
                x, y = (b.extract_element(each, zero) for each in (ours, theirs))
                total = b.fadd(b.fmul(old_sum, x), b.fmul(row_sum, y))
                self.store(total, self.at(merged, 4), 4)
                pairs = zip(self._vectors(totals), self._vectors(sums), strict=True)
                for part, (old, new) in enumerate(pairs):
                    value = b.fadd(b.fmul(old, ours), b.fmul(new, theirs))
                    self.store(value, self._part(totals, part), 4)

    def _finish(self, row: Any) -> None:
        b = self.b
        self._merge(row)
        merged = self.scaled(self.merged, row, 4 * _STATE)
        totals = self.scaled(self.totals, row, 4 * self.width)
        m, row_sum = (self.load(self.at(merged, 4 * i), F32, 4) for i in range(2))
        query, head = (op(row, self.i64(self.group)) for op in (b.sdiv, b.srem))
        token = b.add(self.query, query)
        head = b.add(b.mul(self.head, self.i64(self.group)), head)
        out = self.scaled(self.scaled(self.out, token, self.out_stride), head, 2 * self.width)
        for part, x in enumerate(self._vectors(totals)):
            # + 0.0: the sign of an exact zero would follow keys that the row does not see.
            value = b.fadd(b.fdiv(x, self.splat(row_sum)), self.fill(0.0))
            self.store(self.to_bf16(value), self.at(out, 2 * LANES * part), 2)
        has_stats = b.icmp_signed("!=", self.stats, self.i64(0))
        with b.if_then(has_stats):
            all_heads = b.mul(self.heads, self.i64(self.group))
            place = self.scaled(self.stats, b.add(b.mul(token, all_heads), head), 4 * _STATE)
            self.store(m, place, 4)
            self.store(row_sum, self.at(place, 4), 4)


@functools.cache
def attention_kernel(head_dim: int, group: int) -> int:
    """Return the address of the kernel."""
    return Attention(head_dim, group).compile()


def check_operands(q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise UnsupportedError where this program does not serve q [T, Hq, D] and k."""
    served = q.dtype == k.dtype == torch.bfloat16 and q.device.type == "cpu" and is_available()
    if not served or q.shape[2] % LANES:
        raise UnsupportedError(
            "attention (llvm)",
            f"{q.dtype} and {k.dtype} of head dim {q.shape[2]} on {q.device.type}",
            (
                f"bfloat16 with a head dim that is a multiple of {LANES} on an x86-64 CPU with "
                "AVX2 and llvmlite",
                "impl 'reference'",
            ),
        )


def command(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    plan: AttentionPlan,
    out: torch.Tensor,
    stats: torch.Tensor | None,
) -> tuple[int, tuple[int, ...], int]:
    """Return (kernel, words, units) that write attention to `out`.

    Args:
        q: [T, Hq, D] bf16, heads side by side; k_rows, v_rows: [rows, Hk, D] of equal strides.
        plan: made with `impl="llvm"`; must outlive the command, as all tensors must.
        out: [T, Hq, D] bf16, heads side by side.
        stats: [T, Hq, 2] fp32 for (maximum, row sum), or None.
    """
    params, batch = plan.params, plan.batch
    assert batch is not None
    words = (
        batch.items.data_ptr(),
        batch.items.shape[0],
        q.data_ptr(),
        2 * q.stride(0),
        k_rows.data_ptr(),
        v_rows.data_ptr(),
        2 * k_rows.stride(0),
        batch.starts.data_ptr(),
        batch.lengths.data_ptr(),
        batch.table.data_ptr(),
        batch.table.stride(0),
        batch.block_size,
        plan.block_rows,
        params.num_kv_heads,
        out.data_ptr(),
        2 * out.stride(0),
        0 if stats is None else stats.data_ptr(),
        params.sliding_window or _NO_WINDOW,
        params.key_split // KEY_TILE,
        struct.unpack("<i", struct.pack("<f", params.scale))[0],
    )
    units = batch.items.shape[0] * params.num_kv_heads
    return attention_kernel(params.head_dim, params.group), words, units


def attention_llvm(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v over the keys that each query sees; see `attention_ref`.

    Args:
        q: [T, Hq, D]; k_rows, v_rows: [rows, Hk, D]; bf16.
        plan: from `plan_attention(..., impl="llvm")`.

    Returns:
        (out [T, Hq, D] bf16, lse [T, Hq] fp32).
    """
    check_operands(q, k_rows)
    q, k_rows, v_rows = (_side_by_side(x) for x in (q, k_rows, v_rows))
    if k_rows.stride(0) != v_rows.stride(0):
        k_rows, v_rows = k_rows.contiguous(), v_rows.contiguous()
    out = torch.zeros(q.shape, dtype=q.dtype)
    stats = torch.zeros((*q.shape[:2], _STATE), dtype=torch.float32)
    kernel, words, units = command(q, k_rows, v_rows, plan, out, stats)
    if units:
        run_one(kernel, words, units)
    # An untouched row has a sum of 0, and so lse -inf.
    return out, stats[..., 1].log().add_(stats[..., 0])


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
