"""Ranks on x86 CPUs: one pass over the logits that writes nothing but the counts."""

from __future__ import annotations

import functools

import torch

from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import F32, I16, I64, LANES, Kernel, Variable, floats


class _CountAtLeast(Kernel):
    """Words behind the counter: logits, row bytes, ids, out, rows, columns."""

    def __init__(self) -> None:
        super().__init__("count_at_least")
        b = self.b
        logits, stride, ids, out, rows, columns = self.words(1, 6)
        whole = b.and_(columns, self.i64(-LANES))
        with self.work(rows) as row:
            at = self.scaled(logits, row, stride)
            chosen = self.load(
                self.scaled(at, self.load(self.scaled(ids, row, 8), I64, 8), 4), F32, 4
            )
            count = Variable(self, I64)
            count.set(self.i64(0))
            with self.loop(0, whole, LANES) as column:
                x = self.load(self.scaled(at, column, 4), floats(LANES), 4)
                bits = b.bitcast(b.fcmp_ordered("oge", x, self.splat(chosen)), I16)
                ones = self.intrinsic("llvm.ctpop.i16", I16, bits)
                count.set(b.add(count.get(), b.zext(ones, I64)))
            with self.loop(whole, columns) as column:
                x = self.load(self.scaled(at, column, 4), F32, 4)
                count.set(b.add(count.get(), b.zext(b.fcmp_ordered("oge", x, chosen), I64)))
            self.store(count.get(), self.scaled(out, row, 8), 8)


@functools.cache
def _kernel() -> int:
    return _CountAtLeast().compile()


def count_at_least(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As `ranking.count_at_least`, of checked arguments on a CPU; logits have contiguous rows."""
    rows, columns = logits.shape
    if rows and not 0 <= int(ids.min()) <= int(ids.max()) < columns:
        raise IndexError(f"count_at_least: an id outside [0, {columns})")
    out = torch.empty(rows, dtype=torch.int64)
    ids = ids.contiguous()
    words = (logits.data_ptr(), 4 * logits.stride(0), ids.data_ptr(), out.data_ptr(), rows, columns)
    if rows:
        run_one(_kernel(), words, rows)
    return out
