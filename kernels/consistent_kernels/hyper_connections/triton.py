"""Hyper-connection maps in Triton: a fixed-cut GEMM for the mixes, then row-local maps.

fn is fp32 and x is bf16. A product of the two on tensor cores takes fn as three bf16 terms, whose
sum is fn; each term has its own accumulator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.hyper_connections.spec import (
    HIDDEN_BLOCK,
    K_PART,
    K_STEP,
    MAP_WARPS,
    MIX_WARPS,
    ROW_TILE,
)
from consistent_kernels.triton_tree import (
    halving_tree_columns,
    halving_tree_rows,
    halving_tree_sum_by_pairs,
)


@triton.jit(do_not_specialize=["tokens"])
def _hc_mix_fwd_kernel(
    x_ptr,  # [T, K] bf16, row stride x_stride
    fn_ptr,  # [N, K] fp32 contiguous
    part_ptr,  # [parts, T, BLOCK_N] fp32
    square_ptr,  # [parts, T] fp32
    tokens,
    x_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_TILE: tl.constexpr,
    K_PART: tl.constexpr,
    K_STEP: tl.constexpr,
    STEP_LEVELS: tl.constexpr,
):
    rows = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    part = tl.program_id(1)
    columns = tl.arange(0, BLOCK_N)
    inside = rows < tokens
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    high = tl.zeros((ROW_TILE, BLOCK_N), tl.float32)
    middle = tl.zeros((ROW_TILE, BLOCK_N), tl.float32)
    low = tl.zeros((ROW_TILE, BLOCK_N), tl.float32)
    squares = tl.zeros((ROW_TILE, K_STEP), tl.float32)
    for start in range(0, K_PART, K_STEP):
        k = part * K_PART + start + tl.arange(0, K_STEP)
        x = tl.load(x_rows + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
        weight = tl.load(
            fn_ptr + columns[:, None] * K + k[None, :],
            mask=(columns < N)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        first = weight.to(x.dtype)
        rest = weight - first.to(tl.float32)
        second = rest.to(x.dtype)
        third = (rest - second.to(tl.float32)).to(x.dtype)
        high = tl.dot(x, first.T, high)
        middle = tl.dot(x, second.T, middle)
        low = tl.dot(x, third.T, low)
        x32 = x.to(tl.float32)
        squares += x32 * x32
    at = part.to(tl.int64) * tokens + rows
    tl.store(
        part_ptr + at[:, None] * BLOCK_N + columns[None, :],
        (low + middle) + high,
        mask=inside[:, None],
    )
    square_sum = halving_tree_columns(squares, ROW_TILE, K_STEP, STEP_LEVELS)
    tl.store(square_ptr + at, square_sum, mask=inside)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def _logits(
    part_ptr,
    base_ptr,
    first,
    step: tl.constexpr,
    scale,
    rstd,
    tokens,
    PARTS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_LEVELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Add the parts of COUNT columns from `first`, `step` apart, in one tree, loads at once."""
    columns = first + step * tl.arange(0, COUNT)
    parts = tl.arange(0, PART_ROWS)
    rows = parts.to(tl.int64) * tokens + tl.program_id(0)
    values = tl.load(
        part_ptr + rows[:, None] * BLOCK_N + columns[None, :],
        mask=(parts < PARTS)[:, None],
        other=0.0,
    )
    total = halving_tree_rows(values, PART_ROWS, COUNT, PART_LEVELS)
    return total * tl.broadcast_to(rstd, (COUNT,)) * scale + tl.load(base_ptr + columns)


@triton.jit
def _rows_divided(comb, below, after, S: tl.constexpr, LEVELS: tl.constexpr):
    """comb / (row sums + below) + after, for a matrix [S, S] held as a tuple of its columns.

    Rows are threads, so a row's sum needs no other thread.
    """
    total = comb
    for level in tl.static_range(LEVELS):
        halves = ()
        for place in tl.static_range(S >> (level + 1)):
            halves += (total[place] + total[place + (S >> (level + 1))],)
        total = halves
    divisor = total[0] + below
    divided = ()
    for stream in tl.static_range(S):
        divided += (tl.div_rn(comb[stream], divisor) + after,)
    return divided


@triton.jit
def _columns_divided(comb, below, S: tl.constexpr, LEVELS: tl.constexpr):
    """comb / (column sums + below), for a matrix [S, S] held as a tuple of its columns."""
    divided = ()
    for stream in tl.static_range(S):
        total = halving_tree_sum_by_pairs(comb[stream], S, LEVELS) + below
        divided += (tl.div_rn(comb[stream], tl.full((S,), total, tl.float32)),)
    return divided


@triton.jit(do_not_specialize=["tokens", "norm_eps", "eps", "post_multiplier"])
def _hc_map_fwd_kernel(
    x_ptr,  # [T, S, H] bf16, token stride x_stride
    part_ptr,  # [PARTS, T, BLOCK_N] fp32
    square_ptr,  # [PARTS, T] fp32
    scale_ptr,  # [1] or [3] fp32
    base_ptr,  # [N] fp32
    input_ptr,  # [T, H]
    post_ptr,  # [T, S] fp32 or unused
    comb_ptr,  # [T, S, S] fp32 or unused
    tokens,
    x_stride,
    norm_eps,
    eps,
    post_multiplier,
    H: tl.constexpr,
    S: tl.constexpr,
    STREAM_LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    PART_LEVELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ITERATIONS: tl.constexpr,
    HAS_COMB: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    streams = tl.arange(0, S)
    parts = tl.arange(0, PART_ROWS)
    squares = tl.load(
        square_ptr + parts.to(tl.int64) * tokens + token, mask=parts < PARTS, other=0.0
    )
    square_sum = halving_tree_sum_by_pairs(squares, PART_ROWS, PART_LEVELS)
    mean = tl.div_rn(tl.full((1,), square_sum, tl.float32), tl.full((1,), S * H, tl.float32))
    rstd = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(mean + norm_eps))

    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = columns < H
    pre = _logits(
        part_ptr, base_ptr, 0, 1, tl.load(scale_ptr), rstd, tokens,
        PARTS, PART_ROWS, PART_LEVELS, BLOCK_N, S,
    )  # fmt: skip
    weight = _sigmoid(pre) + eps
    x = tl.load(
        x_ptr + token * x_stride + streams[:, None] * H + columns[None, :],
        mask=inside[None, :],
        other=0.0,
    )
    total = halving_tree_rows(weight[:, None] * x.to(tl.float32), S, BLOCK_H, STREAM_LEVELS)
    tl.store(input_ptr + token * H + columns, total.to(input_ptr.dtype.element_ty), mask=inside)

    if HAS_COMB:  # noqa: SIM102 (decided at compile time)
        if tl.program_id(1) == 0:
            post = _logits(
                part_ptr, base_ptr, S, 1, tl.load(scale_ptr + 1), rstd, tokens,
                PARTS, PART_ROWS, PART_LEVELS, BLOCK_N, S,
            )  # fmt: skip
            tl.store(post_ptr + token * S + streams, _sigmoid(post) * post_multiplier)
            comb = ()
            for stream in tl.static_range(S):
                column = _logits(
                    part_ptr, base_ptr, 2 * S + stream, S, tl.load(scale_ptr + 2), rstd, tokens,
                    PARTS, PART_ROWS, PART_LEVELS, BLOCK_N, S,
                )  # fmt: skip
                comb += (column,)
            peak = comb[0]
            for stream in tl.static_range(1, S):
                peak = tl.maximum(peak, comb[stream])
            exponents = ()
            for stream in tl.static_range(S):
                exponents += (tl.exp(comb[stream] - peak),)
            comb = _rows_divided(exponents, 0.0, eps, S, STREAM_LEVELS)
            comb = _columns_divided(comb, eps, S, STREAM_LEVELS)
            for _ in range(ITERATIONS - 1):
                comb = _rows_divided(comb, eps, 0.0, S, STREAM_LEVELS)
                comb = _columns_divided(comb, eps, S, STREAM_LEVELS)
            for stream in tl.static_range(S):
                tl.store(comb_ptr + (token * S + streams) * S + stream, comb[stream])


# The launcher aligns every argument that Triton specializes on: it always specializes alike.
@triton.jit
def _hc_post_fwd_kernel(
    y_ptr,  # [T, H], row stride y_stride
    x_ptr,  # [T, S, H], token stride x_stride
    post_ptr,  # [T, S] fp32
    comb_ptr,  # [T, S, S] fp32
    out_ptr,  # [T, S, H] contiguous
    y_stride,
    x_stride,
    H: tl.constexpr,
    S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = columns < H
    streams = tl.arange(0, S)
    y = tl.load(y_ptr + token * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(post_ptr + token * S + streams)[:, None] * y[None, :]
    for stream in tl.static_range(S):
        weight = tl.load(comb_ptr + (token * S + stream) * S + streams)
        x = tl.load(x_ptr + token * x_stride + stream * H + columns, mask=inside, other=0.0)
        total += weight[:, None] * x.to(tl.float32)[None, :]
    out = out_ptr + (token * S + streams)[:, None] * H + columns[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside[None, :])


def _flat(x: torch.Tensor) -> torch.Tensor:
    return aligned_rows(x.flatten(1))


def hc_map_fwd(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    post_multiplier: float,
    has_comb: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the mixes and the maps of `hc_pre`, or of `hc_head` (no comb).

    Args:
        x: [T, S, H] bf16; fn: [N, S * H] fp32; scale: [1] or [3] fp32; base: [N] fp32.

    Returns:
        (layer_input [T, H], post [T, S] fp32, comb [T, S, S] fp32); the last two are
        empty without comb.
    """
    tokens, streams, hidden = x.shape
    count, inner = fn.shape
    parts = triton.cdiv(inner, K_PART)
    part_rows = triton.next_power_of_2(parts)
    block_n = max(16, triton.next_power_of_2(count))
    device = x.device
    flat = _flat(x)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=device)
    shapes = ((tokens, streams), (tokens, streams, streams)) if has_comb else ((0,), (0,))
    post, comb = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    if tokens == 0:
        return out, post, comb
    part = torch.empty((parts, tokens, block_n), dtype=torch.float32, device=device)
    squares = torch.empty((parts, tokens), dtype=torch.float32, device=device)
    _hc_mix_fwd_kernel[(triton.cdiv(tokens, ROW_TILE), parts)](
        flat, aligned(fn.contiguous()), part, squares, tokens, flat.stride(0),
        K=inner, N=count, BLOCK_N=block_n, ROW_TILE=ROW_TILE, K_PART=K_PART, K_STEP=K_STEP,
        STEP_LEVELS=K_STEP.bit_length() - 1, num_warps=MIX_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    _hc_map_fwd_kernel[(tokens, triton.cdiv(hidden, HIDDEN_BLOCK))](
        flat, part, squares, aligned(scale.contiguous()), aligned(base.contiguous()),
        out, post, comb, tokens, flat.stride(0), norm_eps, eps, post_multiplier,
        H=hidden, S=streams, STREAM_LEVELS=streams.bit_length() - 1, PARTS=parts,
        PART_ROWS=part_rows, PART_LEVELS=part_rows.bit_length() - 1,
        BLOCK_N=block_n, BLOCK_H=HIDDEN_BLOCK, ITERATIONS=iterations, HAS_COMB=has_comb,
        num_warps=MAP_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out, post, comb


def hc_post_fwd(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Launch out_j = post_j y + sum_i comb_ij x_i; returns [T, S, H]."""
    tokens, streams, hidden = x.shape
    out = torch.empty((tokens, streams, hidden), dtype=x.dtype, device=x.device)
    if tokens:
        flat, rows = _flat(x), aligned_rows(y)
        _hc_post_fwd_kernel[(tokens, triton.cdiv(hidden, HIDDEN_BLOCK))](
            rows, flat, aligned(post.contiguous()), aligned(comb.contiguous()), out,
            rows.stride(0), flat.stride(0), H=hidden, S=streams, BLOCK_H=HIDDEN_BLOCK,
            num_warps=MAP_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out
