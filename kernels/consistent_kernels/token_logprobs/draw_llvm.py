"""The draw of a token on x86 CPUs, from the log-prob's partial results: only one tile is read."""

from __future__ import annotations

import functools
from typing import Any

import torch
from llvmlite import ir

from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import F32, I32, I64, LANES, Kernel, Variable, floats
from consistent_kernels.token_logprobs.spec import VOCAB_TILE

_F64 = ir.DoubleType()
_RESULTS = 3  # of a tile in the partial results: m, s, w


class _Draw(Kernel):
    """Words behind the counter: logits, row bytes, divisors, parts, uniform, out, rows, V, tiles.

    A row's cumulative masses ascend in fp64, over tiles and then over the ids of one tile.
    """

    def __init__(self) -> None:
        super().__init__("draw_tokens")
        b = self.b
        logits, stride, divisors, parts, uniform, out, rows, vocab, tiles = self.words(1, 9)
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

    def _part(self, tile: Any, which: int) -> Any:
        return self.load(self.at(self.scaled(self.parts, tile, 4 * _RESULTS), 4 * which), F32, 4)

    def _highest(self) -> Any:
        b = self.b
        highest = Variable(self, F32)
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
    )
    if rows:
        run_one(_kernel(), words, rows)
    return out
