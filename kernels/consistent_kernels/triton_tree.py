"""Reductions in Triton whose order is written down.

`tl.sum` adds in an order that follows the register layout, which follows element type, warps and
shape. Adjacent pairs are the same additions in every layout.
"""

import triton
import triton.language as tl


@triton.jit
def pair_tree_sum(values, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """Sum a 1-D block of SIZE = 2**LEVELS values by adjacent pairs; returns a block of one."""
    total = values
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(total, (SIZE >> (level + 1), 2)))
        total = left + right
    return total


@triton.jit
def halving_tree_sum(values, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """Sum a 1-D block of SIZE = 2**LEVELS values, first half plus second half; returns one value.

    The high bits of an element's index lie in one thread's registers, so most levels move no data
    (adjacent pairs move all of it): for 1024 values a twentieth of the shared-memory loads.
    """
    total = values
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.trans(tl.reshape(total, (2, SIZE >> (level + 1)))))
        total = left + right
    return total
