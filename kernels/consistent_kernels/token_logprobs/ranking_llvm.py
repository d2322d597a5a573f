"""Ranks on x86 CPUs: one pass over the logits that writes nothing but the counts."""

from __future__ import annotations

import functools
from typing import Any

import torch

from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import F32, I16, I64, LANES, Kernel, Variable, floats


def count_row(kernel: Kernel, row: Any, columns: Any, chosen: Any) -> Any:
    """Return how many of a row's fp32 numbers, at an address, are at least `chosen`."""
    b = kernel.b
    whole = b.and_(columns, kernel.i64(-LANES))
    count = Variable(kernel, I64)
    count.set(kernel.i64(0))
    with kernel.loop(0, whole, LANES) as column:
        x = kernel.load(kernel.scaled(row, column, 4), floats(LANES), 4)
        bits = b.bitcast(b.fcmp_ordered("oge", x, kernel.splat(chosen)), I16)
        ones = kernel.intrinsic("llvm.ctpop.i16", I16, bits)
        count.set(b.add(count.get(), b.zext(ones, I64)))
    with kernel.loop(whole, columns) as column:
        x = kernel.load(kernel.scaled(row, column, 4), F32, 4)
        count.set(b.add(count.get(), b.zext(b.fcmp_ordered("oge", x, chosen), I64)))
    return count.get()


class _CountAtLeast(Kernel):
    """Words behind the counter: logits, row bytes, ids, out, rows, columns."""

    def __init__(self) -> None:
        super().__init__("count_at_least")
        logits, stride, ids, out, rows, columns = self.words(1, 6)
        with self.work(rows) as row:
            at = self.scaled(logits, row, stride)
            token = self.load(self.scaled(ids, row, 8), I64, 8)
            chosen = self.load(self.scaled(at, token, 4), F32, 4)
            self.store(count_row(self, at, columns, chosen), self.scaled(out, row, 8), 8)


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
