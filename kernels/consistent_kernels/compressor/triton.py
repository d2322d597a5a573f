"""The compressor in Triton: one program an entry; sums are written-down trees, added ascending."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.compressor.spec import GROUP, NUM_WARPS
from consistent_kernels.compressor.windows import CompressorParameters
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.triton_tree import halving_tree_rows, halving_tree_sum

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _token_offsets(
    rows_ptr, start, D: tl.constexpr, W: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Return (element offsets of the kv of GROUP tokens, whether each exists)."""
    token = start + tl.arange(0, GROUP)
    row = tl.load(rows_ptr + token)
    series = tl.where(token >= RATIO, D, 0) if OVERLAP else 0
    return tl.multiple_of(tl.maximum(row, 0).to(tl.int64) * (2 * W) + series, 16), row >= 0


@triton.jit(
    do_not_specialize=["norm_eps", "max_position"], do_not_specialize_on_alignment=["positions_ptr"]
)
def _compress_fwd_kernel(
    state_ptr,  # [N, 2 W] fp32 contiguous
    rows_ptr,  # [E, TOKENS] int32 contiguous
    positions_ptr,  # [E] of the first tokens of the windows
    weight_ptr,  # [D]
    cos_ptr,  # [max_position, HALF] fp32
    sin_ptr,  # [max_position, HALF] fp32
    out_ptr,  # [E, D] contiguous
    norm_eps,
    max_position,
    TOKENS: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_LEVELS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)
    entry_rows_ptr = rows_ptr + entry * TOKENS
    peak = tl.full((D,), LOWEST, tl.float32)
    for start in range(0, TOKENS, GROUP):
        offset, exists = _token_offsets(entry_rows_ptr, start, D, W, RATIO, OVERLAP, GROUP)
        score = tl.load(
            state_ptr + offset[:, None] + W + column[None, :],
            mask=exists[:, None],
            other=float("-inf"),
        )
        peak = tl.maximum(peak, tl.max(score, 0))
    total = tl.zeros((D,), tl.float32)
    pooled = tl.zeros((D,), tl.float32)
    for start in range(0, TOKENS, GROUP):
        offset, exists = _token_offsets(entry_rows_ptr, start, D, W, RATIO, OVERLAP, GROUP)
        place = state_ptr + offset[:, None] + column[None, :]
        score = tl.load(place + W, mask=exists[:, None], other=float("-inf"))
        kv = tl.load(place, mask=exists[:, None], other=0.0)
        weight = tl.exp(score - peak[None, :])
        total += halving_tree_rows(weight, GROUP, D, GROUP_LEVELS)
        pooled += halving_tree_rows(kv * weight, GROUP, D, GROUP_LEVELS)
    pooled = tl.div_rn(pooled, tl.where(total > 0, total, 1.0))
    mean = tl.div_rn(halving_tree_sum(pooled * pooled, D, LEVELS), tl.full((1,), D, tl.float32))
    rstd = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(mean + norm_eps))
    normed = pooled * tl.broadcast_to(rstd, (D,)) * tl.load(weight_ptr + column).to(tl.float32)

    even, odd = tl.split(tl.reshape(normed, (D // 2, 2)))
    pair = tl.arange(0, D // 2) - (D // 2 - HALF)
    position = tl.load(positions_ptr + entry).to(tl.int64)
    known = (pair >= 0) & (position >= 0) & (position < max_position)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=known, other=float("nan"))
    sin = tl.load(sin_ptr + position * HALF + pair, mask=known, other=float("nan"))
    turned_even = tl.where(pair >= 0, even * cos - odd * sin, even)
    turned_odd = tl.where(pair >= 0, odd * cos + even * sin, odd)
    # + 0.0: an absent entry is +0, whatever the sign of the weight.
    out = tl.interleave(turned_even, turned_odd) + 0.0
    tl.store(out_ptr + entry * D + column, out.to(out_ptr.dtype.element_ty))


# One addition an element has the same bits in every form, so this kernel may specialize.
@triton.jit
def _write_state_kernel(
    kv_score_ptr,  # [T, 2 W] fp32, row stride stride
    bias_ptr,  # [ratio, W] fp32
    positions_ptr,  # [T]
    slots_ptr,  # [T], -1 for none
    cache_ptr,  # [N, 2 W] fp32 contiguous
    stride,
    ratio,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < W
        row = tl.load(positions_ptr + token) % ratio
        kv = tl.load(kv_score_ptr + token * stride + column, mask=inside)
        score = tl.load(kv_score_ptr + token * stride + W + column, mask=inside)
        bias = tl.load(bias_ptr + row * W + column, mask=inside)
        tl.store(cache_ptr + slot * 2 * W + column, kv, mask=inside)
        tl.store(cache_ptr + slot * 2 * W + W + column, score + bias, mask=inside)


def compress_fwd(
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    params: CompressorParameters,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the kernel; see `compress`."""
    size, entries = params.head_dim, rows.shape[0]
    if size & (size - 1):
        raise UnsupportedError("compress", f"head_dim {size} by impl 'triton'", ["a power of two"])
    out = torch.empty((entries, size), dtype=dtype, device=state.device)
    group = min(GROUP, params.tokens)
    if entries:
        _compress_fwd_kernel[(entries,)](
            aligned(state), aligned(rows.contiguous()), positions, aligned(weight), cos, sin, out,
            params.norm_eps, cos.shape[0],
            TOKENS=params.tokens, RATIO=params.ratio, OVERLAP=params.overlap, D=size,
            W=params.state_width, HALF=cos.shape[1], GROUP=group,
            GROUP_LEVELS=group.bit_length() - 1, LEVELS=size.bit_length() - 1,
            num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def write_state_fwd(
    kv_score: torch.Tensor,
    position_bias: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Launch the write; see `write_compressor_state`."""
    tokens, width = kv_score.shape
    ratio, half = position_bias.shape
    if tokens:
        rows = aligned_rows(kv_score)
        _write_state_kernel[(tokens,)](
            rows, position_bias.contiguous(), positions, slots, cache, rows.stride(0), ratio,
            W=half, BLOCK=triton.next_power_of_2(width // 2), num_warps=NUM_WARPS,
        )  # fmt: skip
