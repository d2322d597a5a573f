"""The mixes of the hyper-connection maps in Triton: a fixed-cut GEMM.

fn is fp32 and x is bf16. A product of the two on tensor cores takes fn as three bf16 terms, whose
sum is fn; the smallest is multiplied first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from consistent_kernels.hyper_connections.spec import K_PART, RUN_PARTS, MixSchedule


@triton.jit
def _row_squares(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr):
    """Sum the squares of a [ROWS, COLUMNS = 8 * 2**LEVELS] block over columns; returns [ROWS].

    Of 8 adjacent values, which one thread holds, in ascending order; of these sums a halving tree.
    A square of bf16 is exact in fp32, and so an fma rounds as a product and a sum do.
    """
    eights = tl.reshape(x.to(tl.float32), (ROWS, COLUMNS // 8, 2, 2, 2))
    even, odd = tl.split(eights)
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    total = x0 * x0
    total = tl.fma(x1, x1, total)
    total = tl.fma(x2, x2, total)
    total = tl.fma(x3, x3, total)
    total = tl.fma(x4, x4, total)
    total = tl.fma(x5, x5, total)
    total = tl.fma(x6, x6, total)
    total = tl.fma(x7, x7, total)
    for level in tl.static_range(LEVELS):
        total = tl.sum(tl.reshape(total, (ROWS, 2, COLUMNS >> (level + 4))), 1)
    return tl.reshape(total, (ROWS,))


@triton.jit
def _cut(value):
    """Return the leading 8 bits of fp32 values as bf16, and what they leave."""
    bits = value.to(tl.uint32, bitcast=True)
    rest = value - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), rest


@triton.jit
def _terms(weight, dtype: tl.constexpr):
    """Return three terms of `dtype` whose sum is the fp32 weight.

    bf16 terms are cut, not rounded: 8 + 8 + 8 bits are all of fp32's, and rounding is slow.
    """
    if dtype == tl.bfloat16:
        first, rest = _cut(weight)
        second, rest = _cut(rest)
        third, _ = _cut(rest)
    else:  # fp16, as Triton's interpreter needs it
        first = weight.to(dtype)
        rest = weight - first.to(tl.float32)
        second = rest.to(dtype)
        third = (rest - second.to(tl.float32)).to(dtype)
    return first, second, third


@triton.jit(do_not_specialize=["tokens"])
def _hc_mix_fwd_kernel(
    x_ptr,  # [T, K] bf16, row stride x_stride
    fn_ptr,  # [N, K] fp32 contiguous
    part_ptr,  # [entries, T, BLOCK_N] fp32: N mixes and the sum of squares
    tokens,
    x_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_TILE: tl.constexpr,
    K_PART: tl.constexpr,
    PART_LEVELS: tl.constexpr,
    RUN_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    if OVERLAP and EARLY:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    entry = tl.program_id(1)
    columns = tl.arange(0, BLOCK_N)
    inside = rows < tokens
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    fn_rows = fn_ptr + columns[:, None] * K
    total = tl.zeros((ROW_TILE, BLOCK_N), tl.float32)
    square_total = tl.zeros((ROW_TILE,), tl.float32)
    run = tl.zeros((ROW_TILE, BLOCK_N), tl.float32)
    square_run = tl.zeros((ROW_TILE,), tl.float32)
    for part in range(PARTS):
        k = (entry * PARTS + part) * K_PART + tl.arange(0, K_PART)
        x_inside = inside[:, None]
        fn_inside = (columns < N)[:, None]
        if K % (K_PART * PARTS) != 0:
            x_inside &= (k < K)[None, :]
            fn_inside &= (k < K)[None, :]
        weight = tl.load(fn_rows + k[None, :], mask=fn_inside, other=0.0)
        x = tl.load(x_rows + k[None, :], mask=x_inside, other=0.0)
        if PARTS == 1:
            tl.debug_barrier()  # or ptxas delays some loads until it has converted others
        first, second, third = _terms(weight, x.dtype)
        low = tl.dot(x, third.T)
        middle = tl.dot(x, second.T)
        high = tl.dot(x, first.T)
        square_run += _row_squares(x, ROW_TILE, K_PART, PART_LEVELS)
        run += (low + middle) + high
        if PARTS > RUN_PARTS:
            ends = part % RUN_PARTS == RUN_PARTS - 1
            total = tl.where(ends, total + run, total)
            square_total = tl.where(ends, square_total + square_run, square_total)
            run = tl.where(ends, 0.0, run)
            square_run = tl.where(ends, 0.0, square_run)
    if OVERLAP and not EARLY:
        gdc_launch_dependents()
    if PARTS <= RUN_PARTS:
        total, square_total = run, square_run
    at = part_ptr + (entry.to(tl.int64) * tokens + rows) * BLOCK_N
    tl.store(at[:, None] + columns[None, :], total, mask=inside[:, None] & (columns < N)[None, :])
    tl.store(at + N, square_total, mask=inside)


def _block_n(count: int) -> int:
    # One column more than the mixes: the sum of squares.
    return max(16, triton.next_power_of_2(count + 1))


def hc_mix_fwd(
    flat: torch.Tensor, fn: torch.Tensor, mix: MixSchedule, overlap: bool
) -> torch.Tensor:
    """Launch the sums over K of x fn^T and of x^2, as far as the schedule takes them.

    Args:
        flat: [T, K] bf16, rows aligned; fn: [N, K] fp32, contiguous and aligned.
        overlap: whether the next kernel on the stream is `hc_map_fwd`'s, which then starts early.

    Returns:
        [entries, T, BLOCK_N] fp32: N mixes, the sum of squares, and columns that nobody reads.
    """
    (tokens, inner), count = flat.shape, fn.shape[0]
    entries = triton.cdiv(triton.cdiv(inner, K_PART), mix.parts)
    block_n = _block_n(count)
    part = torch.empty((entries, tokens, block_n), dtype=torch.float32, device=flat.device)
    _hc_mix_fwd_kernel[(triton.cdiv(tokens, mix.row_tile), entries)](
        flat, fn, part, tokens, flat.stride(0),
        K=inner, N=count, BLOCK_N=block_n, ROW_TILE=mix.row_tile, K_PART=K_PART,
        PART_LEVELS=K_PART.bit_length() - 4, RUN_PARTS=RUN_PARTS, PARTS=mix.parts, OVERLAP=overlap,
        EARLY=mix.early, num_warps=mix.warps, num_stages=mix.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return part
