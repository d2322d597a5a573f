"""Token log-probs for x86 CPUs: the tiles of `reference.py` with this program's own exponential.

Only the exponential differs from the reference; maxima, halving trees and the ascending merge are
the same. The logarithm of a row's sum is PyTorch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.llvm import is_available
from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import F32, I8, I32, I64, LANES, Kernel, Variable, floats
from consistent_kernels.token_logprobs.reference import chosen_logits, divisor, merge_tiles
from consistent_kernels.token_logprobs.spec import SMALLEST_DELTA, VOCAB_TILE

_INF = float("inf")
_RESULTS = 3  # M, S, W
_CHAINS = 4
_STRIDE = VOCAB_TILE // 8


class _Partials(Kernel):
    """Words behind the counter: logits, row bytes, divisors, banned, valid, rows, tiles, out."""

    def __init__(self, has_bans: bool, entropy: bool) -> None:
        super().__init__("token_logprobs")
        self.has_bans, self.entropy, b = has_bans, entropy, self.b
        logits, stride, divisors, self.banned, self.valid, rows, tiles, out = self.words(1, 8)
        self.z, self.e, self.w = (self.scratch(VOCAB_TILE) for _ in range(3))
        one = ir.Constant(F32, 1.0)
        with self.work(rows) as row:
            self.row = self.scaled(logits, row, stride)
            by = self.load(self.scaled(divisors, row, 4), F32, 4)
            self.by = self.splat(by)
            result = self.scaled(out, row, b.mul(tiles, self.i64(4 * _RESULTS)))
            with self.loop(0, tiles) as tile:
                begin = b.mul(tile, self.i64(VOCAB_TILE))
                left = b.sub(self.valid, begin)
                plain = b.and_(
                    b.fcmp_ordered("oeq", by, one), b.icmp_signed(">=", left, self.i64(VOCAB_TILE))
                )
                # Dividing by 1 is exact: a whole tile is read where it stands.
                plain = ir.Constant(plain.type, 0) if has_bans else plain
                source, peaks = Variable(self, I64), self._peaks()
                with b.if_else(plain) as (whole, other):
                    with whole:
                        source.set(self.scaled(self.row, begin, 4))
                        self._look(peaks, lambda j: self._number(source.get(), j))
                    with other:
                        source.set(self.z)
                        self._look(peaks, lambda j: self._divided(begin, left, j))
                self._sums(source.get(), peaks, self.scaled(result, tile, 4 * _RESULTS))

    def _peaks(self) -> list[Variable]:
        peaks = [Variable(self, floats(LANES)) for _ in range(_CHAINS)]
        for peak in peaks:
            peak.set(self.fill(-_INF))
        return peaks

    def _look(self, peaks: list[Variable], number: Callable[[Any], Any]) -> None:
        """Maxima of a tile in several chains: which of equal numbers is taken is all the same."""
        with self.loop(0, VOCAB_TILE, LANES * _CHAINS) as j:
            for i, peak in enumerate(peaks):
                peak.set(self.maximum(peak.get(), number(self.at(j, LANES * i))))

    def _number(self, base: Any, j: Any) -> Any:
        return self.load(self.scaled(base, j, 4), floats(LANES), 4)

    def _divided(self, begin: Any, left: Any, j: Any) -> Any:
        z = self._scaled_logits(self.b.add(begin, j), self.b.sub(left, j))
        self.store(z, self.scaled(self.z, j, 4), 4)
        return z

    def _sums(self, source: Any, peaks: list[Variable], result: Any) -> None:
        b = self.b
        m = self.tree(functools.reduce(self.maximum, [p.get() for p in peaks]), self.maximum)
        none = b.fcmp_ordered("oeq", m, ir.Constant(F32, -_INF))
        base = self.splat(b.select(none, ir.Constant(F32, 0.0), m))
        smallest = self.fill(SMALLEST_DELTA)
        with self.loop(0, _STRIDE, LANES) as j:
            # Vectors _STRIDE apart: the first levels of their tree stay in registers.
            weights, surprises = [], []
            for first in range(0, VOCAB_TILE, _STRIDE):
                delta = b.fsub(self._number(source, self.at(j, first)), base)
                delta = b.select(b.fcmp_ordered("olt", delta, smallest), smallest, delta)
                weights.append(self.exp(delta, is_inside=True))
                surprises.append(b.fmul(delta, weights[-1]) if self.entropy else None)
            self.store(self._halved(weights), self.scaled(self.e, j, 4), 4)
            if self.entropy:
                self.store(self._halved(surprises), self.scaled(self.w, j, 4), 4)
        self.store(m, result, 4)
        for i, numbers in enumerate((self.e, self.w) if self.entropy else (self.e,)):
            places = range(_STRIDE // LANES)
            vectors = [self._number(numbers, self.i64(LANES * place)) for place in places]
            self.store(self.sum(self._halved(vectors)), self.at(result, 4 + 4 * i), 4)

    def _halved(self, vectors: list[Any]) -> Any:
        """Halving tree over vectors."""
        while len(vectors) > 1:
            half = len(vectors) // 2
            vectors = [
                self.b.fadd(*pair) for pair in zip(vectors[:half], vectors[half:], strict=True)
            ]
        return vectors[0]

    def _scaled_logits(self, column: Any, left: Any) -> Any:
        """16 of z; ids that do not exist or are banned are -inf and not read."""
        b = self.b
        lanes = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
        exists = b.icmp_signed("<", lanes, self.splat(left))
        place = b.inttoptr(self.scaled(self.row, column, 4), self.function.args[0].type)
        align = ir.Constant(I32, 4)
        name = f"llvm.masked.load.v{LANES}f32.p0"
        raw = self.intrinsic(name, floats(LANES), place, align, exists, self.fill(-_INF))
        z = b.fdiv(raw, self.by)
        if self.has_bans:
            place = b.inttoptr(b.add(self.banned, column), self.function.args[0].type)
            none = ir.Constant(ir.VectorType(I8, LANES), [0] * LANES)
            name = f"llvm.masked.load.v{LANES}i8.p0"
            bans = self.intrinsic(name, none.type, place, ir.Constant(I32, 1), exists, none)
            exists = b.and_(exists, b.icmp_signed("==", bans, none))
        return b.select(exists, z, self.fill(-_INF))


@functools.cache
def partials_kernel(has_bans: bool, entropy: bool) -> int:
    """Return the address of the kernel."""
    return _Partials(has_bans, entropy).compile()


def partials_shape(rows: int, valid_vocab: int) -> tuple[int, int, int]:
    """Return the shape of `tile_partials`."""
    return rows, -(-valid_vocab // VOCAB_TILE), _RESULTS


def tile_partials(
    logits: torch.Tensor,
    by: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None = None,
    *,
    entropy: bool = False,
) -> torch.Tensor:
    """Per tile of 1024 ids: m = max z, s = sum exp(z - m), w = sum exp(z - m) (z - m).

    Args:
        logits: [T, V] fp32 on a CPU; by: [T] fp32, what they are divided by.
        valid_vocab: ids from here on are -inf; banned: bool [V] or None.
        entropy: whether w is computed.

    Returns:
        [T, tiles, 3] fp32.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, tiles, _ = shape = partials_shape(logits.shape[0], valid_vocab)
    by = by.contiguous()
    bans = None if banned is None else banned.to(torch.uint8).contiguous()
    parts = torch.empty(shape, dtype=torch.float32)
    words = (
        logits.data_ptr(),
        4 * logits.stride(0),
        by.data_ptr(),
        0 if bans is None else bans.data_ptr(),
        valid_vocab,
        rows,
        tiles,
        parts.data_ptr(),
    )
    if rows:
        run_one(partials_kernel(bans is not None, entropy), words, rows)
    return parts


class _AscendingSums(Kernel):
    """Words behind the counter: terms, bytes to the next, scales or 0, out, rows, columns."""

    def __init__(self) -> None:
        super().__init__("ascending_sums")
        b = self.b
        terms, step, scales, out, rows, columns = self.words(1, 6)
        has_scales = b.icmp_signed("!=", scales, self.i64(0))
        total, term = (Variable(self, F32) for _ in range(2))
        with self.work(rows) as row:
            before = b.mul(row, columns)
            with self.loop(0, columns) as column:
                place = b.add(before, column)
                term.set(self.load(self.scaled(terms, place, step), F32, 4))
                with b.if_then(has_scales):
                    term.set(b.fmul(term.get(), self.load(self.scaled(scales, place, 4), F32, 4)))
                is_first = b.icmp_signed("==", column, self.i64(0))
                added = b.fadd(total.get(), term.get())
                total.set(b.select(is_first, term.get(), added))
            self.store(total.get(), self.scaled(out, row, 4), 4)


@functools.cache
def _sums_kernel() -> int:
    return _AscendingSums().compile()


def _ascending_sums(terms: torch.Tensor) -> torch.Tensor:
    """[T, tiles] -> [T], added as the reference adds them."""
    terms = terms.contiguous()
    out = torch.empty(terms.shape[0], dtype=torch.float32)
    words = (terms.data_ptr(), 4, 0, out.data_ptr(), *terms.shape)
    if terms.shape[0]:
        # Few numbers: not worth waking other threads.
        run_one(_sums_kernel(), words, 1)
    return out


def ascending_products(parts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[T, tiles, 3] of `tile_partials`, [T, tiles] -> [T]: the sums of s * scale, ascending."""
    out = torch.empty(parts.shape[0], dtype=torch.float32)
    words = (parts.data_ptr() + 4, 4 * _RESULTS, scale.data_ptr(), out.data_ptr(), *scale.shape)
    if parts.shape[0]:
        run_one(_sums_kernel(), words, 1)
    return out


def token_logprobs_llvm(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    entropy: bool,
    parts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As `token_logprobs_from_logits_ref`, whose arguments and results it has.

    Args:
        parts: of `tile_partials` with the same arguments; computed where it is None.
    """
    if logits.device.type != "cpu" or not is_available():
        raise UnsupportedError(
            "token_logprobs (llvm)",
            f"a tensor on {logits.device.type}",
            ("an x86-64 CPU with AVX2 and llvmlite", "impl 'reference'"),
        )
    by = divisor(temperature)
    if parts is None:
        parts = tile_partials(logits, by, valid_vocab, banned, entropy=entropy)
    m, s, w = parts.unbind(2)
    lse, uncertainty = merge_tiles(m, s, w if entropy else None, _ascending_sums)
    chosen = chosen_logits(logits, ids, temperature, valid_vocab, banned)
    return chosen - lse[:, None], lse, uncertainty
