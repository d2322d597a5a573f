"""Row-local arithmetic of the maps in Triton: divisions without branches, sigmoid, Sinkhorn.

A `div_rn` ends in a branch, so that four of them take four times as long as one. The same steps
without the branch overlap.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SAFE_EPS = (2.0**-30, 1.0)


def has_safe_eps(eps: float) -> bool:
    """Say whether no operand, quotient or remainder of Sinkhorn's divisions can be subnormal.

    Elements start between eps and 1 + eps. Scaling rows and columns leaves their cross ratios, so
    none falls far below eps^2 / S, and what a remainder is a multiple of, 2^-46 of an element, not
    below 2^-112. An exponent of the softmax may be subnormal; its quotient then does not move eps.
    """
    return _SAFE_EPS[0] <= eps <= _SAFE_EPS[1]


@triton.jit
def _reciprocal(divisor):
    guess = 1.0 / divisor  # within 2 ulp on CUDA
    return tl.fma(guess, tl.fma(-divisor, guess, 1.0), guess)


@triton.jit
def _quotient(value, divisor, reciprocal):
    """value / divisor, correctly rounded where no operand, result or remainder is subnormal.

    The steps are those that CUDA's `div_rn` takes there.
    """
    quotient = value * reciprocal
    quotient = tl.fma(tl.fma(-divisor, quotient, value), reciprocal, quotient)
    return tl.fma(tl.fma(-divisor, quotient, value), reciprocal, quotient)


@triton.jit
def _divided(value, divisor, reciprocal, SAFE: tl.constexpr):
    if SAFE:
        return _quotient(value, divisor, reciprocal)
    else:
        return tl.div_rn(value, divisor)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), correctly rounded division; below 2^-100 within 2 ulp."""
    exponent = tl.exp(-x)
    divisor = 1.0 + exponent
    result = _quotient(tl.full(x.shape, 1.0, tl.float32), divisor, _reciprocal(divisor))
    return tl.where(exponent > 1.2676506002282294e30, 1.0 / divisor, result)


@triton.jit
def rstd(square_sum, norm_eps, K: tl.constexpr):
    """1 / sqrt(square_sum / K + norm_eps)."""
    if K & (K - 1) == 0:
        mean = square_sum * (1.0 / K)  # exact, as the division is
    else:
        mean = tl.div_rn(square_sum, tl.full(square_sum.shape, K, tl.float32))
    root = tl.sqrt_rn(mean + norm_eps)
    return tl.div_rn(tl.full(square_sum.shape, 1.0, tl.float32), root)


@triton.jit
def rows_divided(comb, below, S: tl.constexpr, LEVELS: tl.constexpr, SAFE: tl.constexpr):
    """comb / (row sums + below), for matrices held as a tuple of their columns.

    Rows are threads, so a row's sum needs no other thread.
    """
    total = comb
    for level in tl.static_range(LEVELS):
        halves = ()
        for place in tl.static_range(S >> (level + 1)):
            halves += (total[place] + total[place + (S >> (level + 1))],)
        total = halves
    divisor = total[0] + below
    reciprocal = _reciprocal(divisor)
    divided = ()
    for stream in tl.static_range(S):
        divided += (_divided(comb[stream], divisor, reciprocal, SAFE),)
    return divided


@triton.jit
def _column_sum(column, TOKENS: tl.constexpr, S: tl.constexpr):
    """Sum [TOKENS * S] over each token's S rows in a halving tree; every row gets its sum.

    Shapes go back the way they came, so that no value changes its thread.
    """
    if S == 2:
        total = tl.sum(tl.reshape(column, (TOKENS, 2)), 1)
        return tl.reshape(tl.broadcast_to(total[:, None], (TOKENS, 2)), (TOKENS * S,))
    elif S == 4:
        total = tl.sum(tl.sum(tl.reshape(column, (TOKENS, 2, 2)), 1), 1)
        total = tl.broadcast_to(total[:, None], (TOKENS, 2))
        total = tl.broadcast_to(total[:, None, :], (TOKENS, 2, 2))
        return tl.reshape(total, (TOKENS * S,))
    else:
        total = tl.sum(tl.sum(tl.sum(tl.reshape(column, (TOKENS, 2, 2, 2)), 1), 1), 1)
        total = tl.broadcast_to(total[:, None], (TOKENS, 2))
        total = tl.broadcast_to(total[:, None, :], (TOKENS, 2, 2))
        total = tl.broadcast_to(total[:, None, :, :], (TOKENS, 2, 2, 2))
        return tl.reshape(total, (TOKENS * S,))


@triton.jit
def columns_divided(comb, below, TOKENS: tl.constexpr, S: tl.constexpr, SAFE: tl.constexpr):
    """comb / (column sums + below), for matrices held as a tuple of their columns."""
    divided = ()
    for stream in tl.static_range(S):
        divisor = _column_sum(comb[stream], TOKENS, S) + below
        divided += (_divided(comb[stream], divisor, _reciprocal(divisor), SAFE),)
    return divided


@triton.jit
def columns_of(matrices, TOKENS: tl.constexpr, S: tl.constexpr):
    """Return the columns of [TOKENS * S * S] as a tuple of [TOKENS * S]."""
    rows: tl.constexpr = TOKENS * S
    if S == 2:
        return tl.split(tl.reshape(matrices, (rows, 2)))
    elif S == 4:
        even, odd = tl.split(tl.reshape(matrices, (rows, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth
    else:
        even, odd = tl.split(tl.reshape(matrices, (rows, 2, 2, 2)))
        even_low, even_high = tl.split(even)
        odd_low, odd_high = tl.split(odd)
        c0, c4 = tl.split(even_low)
        c2, c6 = tl.split(even_high)
        c1, c5 = tl.split(odd_low)
        c3, c7 = tl.split(odd_high)
        return c0, c1, c2, c3, c4, c5, c6, c7
