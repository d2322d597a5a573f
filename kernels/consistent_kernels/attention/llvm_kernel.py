"""Attention for x86 CPUs as one compiled loop over tiles of 64 keys, for all phases and layouts.

A unit of work is some queries of one sequence and one key head. Its keys and values are widened to
fp32 tile by tile; every row (a query and one of its heads) then takes the keys that it sees. Sums:
a dot product has 16 lanes, each ascending over columns 16 apart, and a halving tree over the lanes;
the sum of a tile's probabilities is a halving tree over its 64 places; P V ascends over keys.
A unit of one query (decode) uses each key and value once: it takes them from their pages, and asks
for those of the thread's next unit. The sums are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from consistent_kernels.attention.plan import UNIT_ROWS
from consistent_kernels.attention.spec import KEY_TILE
from consistent_kernels.llvm.kernel import F32, I32, I64, LANES, LOWEST, Kernel, Variable, floats

STATE = 2
"""Numbers that a row carries from tile to tile: running maximum and row sum."""

_SHARE = 4
_LINE = 64  # bytes of a cache line
_ACCUMULATORS = 24  # vectors that P V may keep in registers


class Attention(Kernel):
    """The words of its command: see `command`. Pages hold a multiple of `run` keys, 16 at most."""

    def __init__(
        self, head_dim: int, group: int, bits: int | None = None, *, run: int = LANES
    ) -> None:
        super().__init__("attention", bits)
        self.width, self.group, self.run = head_dim, group, run
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
        self.state, self.merged = (self.scratch(rows * STATE) for _ in range(2))
        # Of the heads of one query: scores, then probabilities; exp(old - new maximum).
        self.scores, self.factors = self.scratch(KEY_TILE * group), self.scratch(group)
        self.dots = self.scratch(LANES * LANES * group)
        units = b.mul(count, self.heads)
        with self.work_ahead(units, _SHARE) as (unit, following):
            self._look_ahead(following, units)
            self._unit(unit)

    def _look_ahead(self, unit: Any, units: Any) -> None:
        """Say where the keys of the next unit lie: `ahead_last` is -1 where there is none."""
        b = self.b
        exists = b.icmp_signed("<", unit, units)
        unit = b.select(exists, unit, self.i64(0))
        item = self.scaled(self.items, b.sdiv(unit, self.heads), 12)
        self.ahead_head = b.srem(unit, self.heads)
        sequence, first = (self._int(self.at(item, 4 * i), self.i64(0)) for i in range(2))
        begin = self._int(self.starts, sequence)
        queries = b.sub(self._int(self.starts, self.at(sequence, 1)), begin)
        last = b.add(b.sub(self._int(self.lengths, sequence), queries), first)
        self.ahead_pages = self.scaled(self.table, sequence, b.mul(self.table_stride, self.i64(4)))
        self.ahead_last = b.select(exists, last, self.i64(-1))

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
        alone = b.icmp_signed("==", count, self.i64(1))
        with self.loop(start, b.add(tile_of(last), self.i64(1))) as tile:
            key = b.mul(tile, self.i64(KEY_TILE))
            low = self._larger(b.sub(self._first_key(self.position), key), self.i64(0))
            high = self._smaller(b.sub(last, key), self.i64(KEY_TILE - 1))
            with b.if_else(alone) as (one, several):
                with one:
                    self._one_query(tile, start, key, low, high)
                with several:
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
                merged = self.scaled(self.merged, self.b.add(row, head), 4 * STATE)
                self.store(lowest, merged, 4)
                # No row sum of a split is 0 or less: the largest probability is 1.
                self.store(zero, self.at(merged, 4), 4)

    def _clear(self, row: Any) -> None:
        state = self.scaled(self.state, row, 4 * STATE)
        self.store(ir.Constant(F32, LOWEST), state, 4)
        self.store(ir.Constant(F32, 0.0), self.at(state, 4), 4)
        sums = self.scaled(self.sums, row, 4 * self.width)
        for part in range(self.parts):
            self.store(self.fill(0.0), self._part(sums, part), 4)

    def _row_of(self, pages: Any, head: Any, position: Any) -> Any:
        """Return the offset, in bytes, of a position's key and value of a head."""
        b = self.b
        page = self._int(pages, b.sdiv(position, self.block))
        row = b.add(b.mul(page, self.block_rows), b.srem(position, self.block))
        return self.scaled(b.mul(row, self.row_bytes), head, 2 * self.width)

    @contextmanager
    def _runs(self, key: Any, low: Any, high: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Walk a tile's keys low .. high in runs that lie in one page, one behind the other.

        Yields (place of the run in the tile, offset of its first row, first and last place in it).
        """
        b, run = self.b, self.i64(self.run)
        with self.loop(b.sdiv(low, run), b.add(b.sdiv(high, run), self.i64(1))) as chunk:
            begin = b.mul(chunk, run)
            offset = self._row_of(self.pages, self.head, b.add(key, begin))
            first = self._larger(b.sub(low, begin), self.i64(0))
            yield (
                begin,
                offset,
                first,
                self._smaller(b.sub(high, begin), self.i64(self.run - 1)),
            )

    def _read(self, base: Any) -> list[Any]:
        """Return the row of bf16 at an address, widened."""
        return [self.load_bf16(self.at(base, 2 * LANES * part)) for part in range(self.parts)]

    def _widen(self, key: Any, low: Any, high: Any) -> None:
        """Keys low .. high of the tile, and their values, as fp32."""
        b = self.b
        with (
            self._runs(key, low, high) as (begin, offset, first, stop),
            self.loop(first, b.add(stop, self.i64(1))) as place,
        ):
            shift = b.add(offset, b.mul(place, self.row_bytes))
            target = b.mul(b.add(begin, place), self.i64(4 * self.width))
            for rows, tile in ((self.k, self.k_tile), (self.v, self.v_tile)):
                for part, x in enumerate(self._read(b.add(rows, shift))):
                    self.store(x, self._part(b.add(tile, target), part), 4)

    def _one_query(self, tile: Any, start: Any, key: Any, low: Any, high: Any) -> None:
        """One tile for all heads of a unit's only query: as `_query`, from the pages."""
        b = self.b
        at_split = b.icmp_signed("==", b.srem(tile, self.split), self.i64(0))
        begins = b.and_(at_split, b.icmp_signed(">", tile, start))
        with self.loop(0, self.group) as head:
            with b.if_then(begins):
                self._merge(head)
                self._clear(head)
            self._hide(head)
        lanes = self.i64(LANES)
        with self.loop(b.sdiv(low, lanes), b.add(b.sdiv(high, lanes), self.i64(1))) as chunk:
            start_of = b.mul(chunk, lanes)
            to = self._smaller(high, b.add(start_of, self.i64(LANES - 1)))
            with (
                self._runs(key, self._larger(low, start_of), to) as (begin, offset, first, stop),
                self.loop(first, b.add(stop, self.i64(1))) as place,
            ):
                shift = b.add(offset, b.mul(place, self.row_bytes))
                self._fetch(b.add(self.v, shift))
                keys = self._read(b.add(self.k, shift))
                lane = b.sub(b.add(begin, place), start_of)
                for head in range(self.group):
                    queries = self._vectors(self.at(self.queries, 4 * self.width * head))
                    dot = self.scaled(self.dots, self.at(lane, LANES * head), 4 * LANES)
                    self.store(self._dot(queries, keys), dot, 4)
            for head in range(self.group):
                dots = self.at(self.dots, 4 * LANES * LANES * head)
                dots = [self.load(self._part(dots, j), floats(LANES), 4) for j in range(LANES)]
                scores_at = self.at(self.scores, 4 * KEY_TILE * head)
                self._store_scores(dots, scores_at, chunk, low, high)
        with self.loop(0, self.group) as head:
            self._soften(head, head)
        for heads in self._together():
            weighted = self._no_values(heads)
            with self._runs(key, low, high) as (begin, offset, first, stop):
                if heads.start == 0:
                    self._fetch_keys(b.add(key, begin))
                with self.loop(first, b.add(stop, self.i64(1))) as place:
                    shift = b.add(offset, b.mul(place, self.row_bytes))
                    values = self._read(b.add(self.v, shift))
                    self._weigh(weighted, heads, b.add(begin, place), values)
            self._close(weighted, heads, self.i64(0))

    def _fetch(self, row: Any) -> None:
        for line in range(0, 2 * self.width, _LINE):
            self.prefetch(self.at(row, line))

    def _fetch_keys(self, position: Any) -> None:
        """Ask for a run of the next unit's keys."""
        b = self.b
        with b.if_then(b.icmp_signed("<=", position, self.ahead_last)):
            row = b.add(self.k, self._row_of(self.ahead_pages, self.ahead_head, position))
            for place in range(self.run):
                self._fetch(self.scaled(row, self.i64(place), self.row_bytes))

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
            for heads in self._together():
                self._add_values(begin, heads, low, high)

    def _together(self) -> list[range]:
        """Return the heads whose P V is summed at once."""
        count = max(1, _ACCUMULATORS // self.parts)
        return [range(i, min(i + count, self.group)) for i in range(0, self.group, count)]

    def _dot(self, queries: list[Any], keys: list[Any]) -> Any:
        total = self.b.fmul(queries[0], keys[0])
        for x, y in zip(queries[1:], keys[1:], strict=True):
            total = self.fma(x, y, total)
        return total

    def _score_chunk(self, row: Any, scores_at: Any, chunk: Any, low: Any, high: Any) -> None:
        """16 scores; keys that the row does not see have -inf."""
        queries = self._vectors(self.scaled(self.queries, row, 4 * self.width))
        keys = self.scaled(self.k_tile, chunk, 4 * self.width * LANES)
        dots = [
            self._dot(queries, self._vectors(self.at(keys, 4 * self.width * j)))
            for j in range(LANES)
        ]
        self._store_scores(dots, scores_at, chunk, low, high)

    def _store_scores(
        self, dots: list[Any], scores_at: Any, chunk: Any, low: Any, high: Any
    ) -> None:
        b = self.b
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
        self._hide(head)
        first, last = (b.sdiv(x, self.i64(LANES)) for x in (low, high))
        with self.loop(first, b.add(last, self.i64(1))) as chunk:
            self._score_chunk(row, scores_at, chunk, low, high)
        self._soften(row, head)

    def _hide(self, head: Any) -> None:
        scores_at = self.scaled(self.scores, head, 4 * KEY_TILE)
        for part in range(KEY_TILE // LANES):
            self.store(self.fill(float("-inf")), self._part(scores_at, part), 4)

    def _soften(self, row: Any, head: Any) -> None:
        """Scores to probabilities."""
        b = self.b
        scores_at = self.scaled(self.scores, head, 4 * KEY_TILE)
        scores = [
            self.load(self._part(scores_at, i), floats(LANES), 4) for i in range(KEY_TILE // LANES)
        ]
        state = self.scaled(self.state, row, 4 * STATE)
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
        weighted = self._no_values(heads)
        with self.loop(low, self.b.add(high, self.i64(1))) as j:
            values = self._vectors(self.scaled(self.v_tile, j, 4 * self.width))
            self._weigh(weighted, heads, j, values)
        self._close(weighted, heads, begin)

    def _no_values(self, heads: range) -> dict[tuple[int, int], Variable]:
        weighted = {
            (head, part): Variable(self, floats(LANES))
            for head in heads
            for part in range(self.parts)
        }
        for each in weighted.values():
            each.set(self.fill(0.0))
        return weighted

    def _weigh(self, weighted: dict, heads: range, j: Any, values: list[Any]) -> None:
        place = self.scaled(self.scores, j, 4)
        for head in heads:
            weight = self.splat(self.load(self.at(place, 4 * KEY_TILE * head), F32, 4))
            for part, value in enumerate(values):
                total = weighted[head, part]
                total.set(self.fma(weight, value, total.get()))

    def _close(self, weighted: dict, heads: range, begin: Any) -> None:
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
        state = self.scaled(self.state, row, 4 * STATE)
        merged = self.scaled(self.merged, row, 4 * STATE)
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
        merged = self.scaled(self.merged, row, 4 * STATE)
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
            place = self.scaled(self.stats, b.add(b.mul(token, all_heads), head), 4 * STATE)
            self.store(m, place, 4)
            self.store(row_sum, self.at(place, 4), 4)
