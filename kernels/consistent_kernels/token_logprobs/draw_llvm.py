"""The draw of a token on x86 CPUs, from the log-prob's partial results, and its score beside it.

Between large kernels a call of PyTorch finds cold caches, so the score of a drawn token takes as
few of them as the spec of the log-prob leaves: exponential and logarithm of the merge.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from llvmlite import ir

from consistent_kernels.counters import count
from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import F32, I32, I64, LANES, Kernel, Variable, floats
from consistent_kernels.token_logprobs.llvm import ascending_products, tile_partials
from consistent_kernels.token_logprobs.ranking_llvm import count_row
from consistent_kernels.token_logprobs.spec import SMALLEST_DELTA, VOCAB_TILE

_F64 = ir.DoubleType()
_RESULTS = 3  # of a tile in the partial results: m, s, w


class _Draw(Kernel):
    """Words behind the counter: logits, row bytes, divisors, parts, uniform, out, rows, V, tiles,
    deltas, scores, ranks; the last three are written where deltas is not 0.

    A row's cumulative masses ascend in fp64, over tiles and then over the ids of one tile.
    """

    def __init__(self) -> None:
        super().__init__("draw_tokens")
        b = self.b
        logits, stride, divisors, parts, uniform, out, rows, vocab, tiles = self.words(1, 9)
        deltas, scores, ranks = self.words(10, 3)
        is_scored = b.icmp_signed("!=", deltas, self.i64(0))
        self.weights = self.scratch(LANES)
        self.vocab, self.tiles = vocab, tiles
        zero = ir.Constant(_F64, 0.0)
        with self.work(rows) as row:
            self.row = self.scaled(logits, row, stride)
            self.by = self.splat(self.load(self.scaled(divisors, row, 4), F32, 4))
            self.parts = self.scaled(parts, row, b.mul(tiles, self.i64(4 * _RESULTS)))
            self.highest = self._highest()
            total = Variable(self, _F64)
            total.set(zero)
            with self.loop(0, tiles) as tile:
                total.set(b.fadd(total.get(), self._mass(tile)))
            share = self.load(self.scaled(uniform, row, 8), _F64, 8)
            target = b.fmul(share, total.get())
            tile, before = self._tile_of(target)
            token = self._inside(b.mul(tile, self.i64(VOCAB_TILE)), b.fsub(target, before))
            last = b.sub(vocab, self.i64(1))
            token = b.select(b.icmp_signed(">", token, last), last, token)
            self.store(token, self.scaled(out, row, 8), 8)
            with b.if_then(is_scored):
                self._deltas(self.scaled(deltas, row, b.mul(tiles, self.i64(4))))
                chosen = self.load(self.scaled(self.row, token, 4), F32, 4)
                by = self.load(self.scaled(divisors, row, 4), F32, 4)
                score = self.scaled(scores, row, 8)
                self.store(self.largest.get(), score, 4)
                self.store(b.fdiv(chosen, by), self.at(score, 4), 4)
                rank = count_row(self, self.row, vocab, chosen)
                self.store(rank, self.scaled(ranks, row, 8), 8)

    def _deltas(self, out: Any) -> None:
        """What the merge of tiles takes the exponential of."""
        b, smallest = self.b, ir.Constant(F32, SMALLEST_DELTA)
        with self.loop(0, self.tiles) as tile:
            delta = b.fsub(self._part(tile, 0), self.highest)
            delta = b.select(b.fcmp_ordered("olt", delta, smallest), smallest, delta)
            self.store(delta, self.scaled(out, tile, 4), 4)

    def _part(self, tile: Any, which: int) -> Any:
        return self.load(self.at(self.scaled(self.parts, tile, 4 * _RESULTS), 4 * which), F32, 4)

    def _highest(self) -> Any:
        b = self.b
        self.largest = highest = Variable(self, F32)
        highest.set(ir.Constant(F32, -float("inf")))
        with self.loop(0, self.tiles) as tile:
            highest.set(self.maximum(highest.get(), self._part(tile, 0)))
        none = b.fcmp_ordered("oeq", highest.get(), ir.Constant(F32, -float("inf")))
        return b.select(none, ir.Constant(F32, 0.0), highest.get())

    def _mass(self, tile: Any) -> Any:
        delta = self.b.fsub(self._part(tile, 0), self.highest)
        scale = self.b.extract_element(self.exp(self.splat(delta)), ir.Constant(I32, 0))
        return self.b.fpext(self.b.fmul(self._part(tile, 1), scale), _F64)

    def _tile_of(self, target: Any) -> tuple[Any, Any]:
        """Return the first tile up to which there is more mass than `target`, and the mass before.

        The last tile where there is none: of NaN, or by rounding.
        """
        b = self.b
        chosen, before, mass = Variable(self, I64), Variable(self, _F64), Variable(self, _F64)
        chosen.set(self.i64(-1))
        for each in (before, mass):
            each.set(ir.Constant(_F64, 0.0))
        with (
            self.loop(0, self.tiles) as tile,
            b.if_then(b.icmp_signed("<", chosen.get(), self.i64(0))),
        ):
            after = b.fadd(mass.get(), self._mass(tile))
            before.set(mass.get())
            mass.set(after)
            is_last = b.icmp_signed("==", tile, b.sub(self.tiles, self.i64(1)))
            found = b.or_(b.fcmp_ordered("ogt", after, target), is_last)
            chosen.set(b.select(found, tile, chosen.get()))
        return chosen.get(), before.get()

    def _inside(self, begin: Any, target: Any) -> Any:
        """The first id with more mass up to it than `target`; else the last id that has mass."""
        b = self.b
        found, last, mass = Variable(self, I64), Variable(self, I64), Variable(self, _F64)
        found.set(self.i64(-1))
        last.set(begin)
        mass.set(ir.Constant(_F64, 0.0))
        left = b.sub(self.vocab, begin)
        end = b.select(b.icmp_signed("<", left, self.i64(VOCAB_TILE)), left, self.i64(VOCAB_TILE))
        with self.loop(0, end, LANES) as j, b.if_then(b.icmp_signed("<", found.get(), self.i64(0))):
            self.store(self._weights(b.add(begin, j), b.sub(left, j)), self.weights, 4)
            with self.loop(0, LANES) as lane:
                weight = self.load(self.scaled(self.weights, lane, 4), F32, 4)
                after = b.fadd(mass.get(), b.fpext(weight, _F64))
                place = b.add(b.add(begin, j), lane)
                grows = b.fcmp_ordered("ogt", after, mass.get())
                last.set(b.select(grows, place, last.get()))
                mass.set(after)
                is_first = b.and_(
                    b.fcmp_ordered("ogt", after, target),
                    b.icmp_signed("<", found.get(), self.i64(0)),
                )
                found.set(b.select(is_first, place, found.get()))
        is_found = b.icmp_signed(">=", found.get(), self.i64(0))
        return b.select(is_found, found.get(), last.get())

    def _weights(self, column: Any, left: Any) -> Any:
        """exp(z - highest) of 16 ids, 0 of those beyond the vocabulary."""
        b = self.b
        lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
        exists = b.icmp_signed("<", lanes, self.splat(left))
        place = b.inttoptr(self.scaled(self.row, column, 4), self.function.args[0].type)
        name = f"llvm.masked.load.v{LANES}f32.p0"
        none = self.fill(-float("inf"))
        raw = self.intrinsic(name, floats(LANES), place, ir.Constant(I32, 4), exists, none)
        weight = self.exp(b.fsub(b.fdiv(raw, self.by), self.splat(self.highest)))
        return b.select(exists, weight, self.fill(0.0))


@functools.cache
def _kernel() -> int:
    return _Draw().compile()


def draw(
    logits: torch.Tensor, by: torch.Tensor, parts: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """One token a row from softmax(logits / by), by its number in [0, 1).

    Args:
        logits: [T, V] fp32; by: [T] fp32; uniform: [T] fp64.
        parts: of `llvm.tile_partials(logits, by, V)`.

    Returns:
        [T] int64, in [0, V) also for a row without mass (NaN, or every token masked).
    """
    out, _ = _drawn(logits, by, parts, uniform, None)
    return out


class Drawn(NamedTuple):
    """One drawn token a row.

    Attributes:
        ids: [T] int64, of `draw`.
        logprob: [T] fp32, the bits of `token_logprobs_from_logits(..., impl="llvm")`.
        rank: [T] int64, of `count_at_least`.
    """

    ids: torch.Tensor
    logprob: torch.Tensor
    rank: torch.Tensor


def draw_and_score(logits: torch.Tensor, by: torch.Tensor, uniform: torch.Tensor) -> Drawn:
    """Draw a token a row from softmax(logits / by) and score it: the vocabulary is read twice.

    Args:
        logits: [T, V] fp32; by: [T] fp32, above 0; uniform: [T] fp64 in [0, 1).
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count("token_logprobs", "llvm")
    parts = tile_partials(logits, by, vocab)
    deltas = torch.empty(parts.shape[:2], dtype=torch.float32)
    scores = torch.empty((rows, 2), dtype=torch.float32)
    ranks = torch.empty(rows, dtype=torch.int64)
    ids, parts = _drawn(logits, by, parts, uniform, (deltas, scores, ranks))
    total = ascending_products(parts, deltas.exp_())
    maximum, chosen = scores.unbind(1)
    return Drawn(ids, chosen - (maximum + total.log_()), ranks)


def _drawn(
    logits: torch.Tensor,
    by: torch.Tensor,
    parts: torch.Tensor,
    uniform: torch.Tensor,
    scored: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([T] ids, parts as the kernel read them)."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    by, parts, uniform = by.contiguous(), parts.contiguous(), uniform.contiguous()
    out = torch.empty(rows, dtype=torch.int64)
    words = (
        logits.data_ptr(),
        4 * logits.stride(0),
        by.data_ptr(),
        parts.data_ptr(),
        uniform.data_ptr(),
        out.data_ptr(),
        rows,
        vocab,
        parts.shape[1],
        *((0, 0, 0) if scored is None else (each.data_ptr() for each in scored)),
    )
    if rows:
        run_one(_kernel(), words, rows)
    return out, parts
