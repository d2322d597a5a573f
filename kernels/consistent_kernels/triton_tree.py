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
