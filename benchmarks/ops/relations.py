"""Cheap bitwise checks that a case runs before it is timed; the tests hold the thorough ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from consistent_kernels.testing import assert_bitwise_equal

Result = torch.Tensor | tuple[torch.Tensor, ...]

BATCHES = (1, 2, 7, 8, 16, 17, 31, 33, 64, 65, 128, 129, 256, 257, 1000, 2048)
"""Rows at once, on both sides of the sizes at which stock kernels switch."""


def check_rows(run: Callable[[slice], Result], rows: int, batches: Iterable[int] = BATCHES) -> None:
    """Assert R1 and R2: a row has the bits it has among all `rows`, in any smaller batch.

    Args:
        run: computes the given rows; its results (one or several) have rows first.
        rows: how many there are.
        batches: sizes to try, each at the start, in the middle and at the end.

    Raises:
        AssertionError: naming the first differing element.
    """
    whole = _tuple(run(slice(0, rows)))
    _compare(whole, run(slice(0, rows)), slice(0, rows), "a second run")
    for size in batches:
        if size >= rows:
            continue
        for start in sorted({0, (rows - size) // 2 | 1, rows - size}):
            part = slice(start, min(start + size, rows))
            _compare(whole, run(part), part, f"{part.stop - start} rows from {start}")


def _compare(whole: tuple[torch.Tensor, ...], part: Result, rows: slice, what: str) -> None:
    for index, (all_rows, some) in enumerate(zip(whole, _tuple(part), strict=True)):
        assert_bitwise_equal(some, all_rows[rows].contiguous(), f"result {index}, {what}")


def _tuple(result: Result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
