"""Token log-probs for x86 CPUs: the tiles of `reference.py` with this program's own exponential.

Only the exponential differs from the reference; maxima, halving trees and the ascending merge are
the same. The logarithm of a row's sum is PyTorch's.
"""

from __future__ import annotations

import functools
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


class _Partials(Kernel):
    """Words behind the counter: logits, row bytes, divisors, banned, valid, rows, tiles, out."""

    def __init__(self, has_bans: bool, entropy: bool) -> None:
        super().__init__("token_logprobs")
        self.has_bans, self.entropy, b = has_bans, entropy, self.b
        logits, stride, divisors, self.banned, self.valid, rows, tiles, out = self.words(1, 8)
        self.z, self.e, self.w = (self.scratch(VOCAB_TILE) for _ in range(3))
        with self.work(rows) as row:
            self.row = self.scaled(logits, row, stride)
            self.by = self.splat(self.load(self.scaled(divisors, row, 4), F32, 4))
            result = self.scaled(out, row, b.mul(tiles, self.i64(4 * _RESULTS)))
            with self.loop(0, tiles) as tile:
                self._tile(tile, self.scaled(result, tile, 4 * _RESULTS))

    def _tile(self, tile: Any, result: Any) -> None:
        b = self.b
        begin = b.mul(tile, self.i64(VOCAB_TILE))
        left = b.sub(self.valid, begin)
        peak = Variable(self, floats(LANES))
        peak.set(self.fill(-_INF))
        with self.loop(0, VOCAB_TILE, LANES) as j:
            z = self._scaled_logits(b.add(begin, j), b.sub(left, j))
            self.store(z, self.scaled(self.z, j, 4), 4)
            peak.set(self.maximum(peak.get(), z))
        m = self.tree(peak.get(), self.maximum)
        none = b.fcmp_ordered("oeq", m, ir.Constant(F32, -_INF))
        base = self.splat(b.select(none, ir.Constant(F32, 0.0), m))
        smallest = self.fill(SMALLEST_DELTA)
        with self.loop(0, VOCAB_TILE, LANES) as j:
            delta = b.fsub(self.load(self.scaled(self.z, j, 4), floats(LANES), 4), base)
            delta = b.select(b.fcmp_ordered("olt", delta, smallest), smallest, delta)
            weight = self.exp(delta)
            self.store(weight, self.scaled(self.e, j, 4), 4)
            if self.entropy:
                self.store(b.fmul(delta, weight), self.scaled(self.w, j, 4), 4)
        self.store(m, result, 4)
        self.store(self._tree(self.e), self.at(result, 4), 4)
        if self.entropy:
            self.store(self._tree(self.w), self.at(result, 8), 4)

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

    def _tree(self, numbers: Any) -> Any:
        half = VOCAB_TILE // 2
        while half >= LANES:
            with self.loop(0, half, LANES) as j:
                low = self.scaled(numbers, j, 4)
                high = self.load(self.at(low, 4 * half), floats(LANES), 4)
                self.store(self.b.fadd(self.load(low, floats(LANES), 4), high), low, 4)
            half //= 2
        return self.sum(self.load(numbers, floats(LANES), 4))


@functools.cache
def partials_kernel(has_bans: bool, entropy: bool) -> int:
    """Return the address of the kernel."""
    return _Partials(has_bans, entropy).compile()


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
    rows, tiles = logits.shape[0], -(-valid_vocab // VOCAB_TILE)
    by = by.contiguous()
    bans = None if banned is None else banned.to(torch.uint8).contiguous()
    parts = torch.empty((rows, tiles, _RESULTS), dtype=torch.float32)
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


def token_logprobs_llvm(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As `token_logprobs_from_logits_ref`, whose arguments and results it has."""
    if logits.device.type != "cpu" or not is_available():
        raise UnsupportedError(
            "token_logprobs (llvm)",
            f"a tensor on {logits.device.type}",
            ("an x86-64 CPU with AVX2 and llvmlite", "impl 'reference'"),
        )
    by = divisor(temperature)
    parts = tile_partials(logits, by, valid_vocab, banned, entropy=entropy)
    m, s, w = parts.unbind(2)
    lse, uncertainty = merge_tiles(m, s, w if entropy else None)
    chosen = chosen_logits(logits, ids, temperature, valid_vocab, banned)
    return chosen - lse[:, None], lse, uncertainty
