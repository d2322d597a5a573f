"""Reductions in Triton whose order is written down.

`tl.sum` adds in an order that follows the register layout, which follows element type, warps and
shape. A halving tree is the same additions in every layout.
"""

import triton
import triton.language as tl


@triton.jit
def halving_tree_sum(values, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """Sum a 1-D block of SIZE = 2**LEVELS values, first half plus second half; returns one value.

    The high bits of an element's index lie in one thread's registers, so most levels move no data
    (adjacent pairs would move all of it: twenty times the shared-memory loads for 1024 values).
    """
    total = values
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.trans(tl.reshape(total, (2, SIZE >> (level + 1)))))
        total = left + right
    return total


@triton.jit
def halving_tree_sum_by_pairs(values, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """`halving_tree_sum` with the same additions, compiled to shuffles; returns a scalar.

    A `tl.sum` of two values has one order. Where a level needs data of other threads, the form with
    `tl.split` lets the compiler give every thread all values (512 columns on four warps: 128
    16-byte loads from shared memory and 511 additions in each thread); this form does not.
    """
    total = values
    for level in tl.static_range(LEVELS):
        total = tl.sum(tl.reshape(total, (2, SIZE >> (level + 1))), 0)
    return tl.sum(total, 0)


@triton.jit
def halving_tree_columns(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr):
    """Sum a [ROWS, COLUMNS] block over COLUMNS = 2**LEVELS as above; returns [ROWS]."""
    total = values
    for level in tl.static_range(LEVELS):
        halves = tl.reshape(total, (ROWS, 2, COLUMNS >> (level + 1)))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        total = left + right
    return tl.reshape(total, (ROWS,))


@triton.jit
def halving_tree_rows(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr):
    """Sum a [ROWS, COLUMNS] block over ROWS = 2**LEVELS as above; returns [COLUMNS]."""
    total = values
    for level in tl.static_range(LEVELS):
        halves = tl.reshape(total, (2, ROWS >> (level + 1), COLUMNS))
        left, right = tl.split(tl.permute(halves, (1, 2, 0)))
        total = left + right
    return tl.reshape(total, (COLUMNS,))
