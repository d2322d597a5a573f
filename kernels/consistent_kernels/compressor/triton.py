"""The compressor in Triton: one program an entry; sums are written-down trees, added ascending."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.compressor.spec import GROUP, num_warps
from consistent_kernels.compressor.windows import CompressorParameters
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.kv_cache_fp8.layout import KVLayout
from consistent_kernels.kv_cache_fp8.triton import (
    check_alignment,
    slot_address,
    store_fp8_groups,
    widen,
    write_constants,
)
from consistent_kernels.triton_tree import halving_tree_rows, halving_tree_sum_by_pairs

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _load_group(
    state_ptr, row, start, D: tl.constexpr, W: tl.constexpr, RATIO: tl.constexpr,
    OVERLAP: tl.constexpr, GROUP: tl.constexpr, WITH_KV: tl.constexpr,
):  # fmt: skip
    """Return (scores [GROUP, D], -inf where no token is; kv [GROUP, D], 0 there).

    Args:
        row: [GROUP] rows of state of the tokens from `start` on, -1 for none.
    """
    exists = (row >= 0)[:, None]
    series = tl.where(start + tl.arange(0, GROUP) >= RATIO, D, 0) if OVERLAP else 0
    offset = tl.multiple_of(tl.maximum(row, 0).to(tl.int64) * (2 * W) + series, 16)
    place = state_ptr + offset[:, None] + tl.arange(0, D)[None, :]
    score = tl.load(place + W, mask=exists, other=float("-inf"))
    kv = tl.load(place, mask=exists, other=0.0) if WITH_KV else score
    return score, kv


@triton.jit
def _group_sums(
    score, kv, peak, D: tl.constexpr, GROUP: tl.constexpr, GROUP_LEVELS: tl.constexpr
):  # fmt: skip
    """Return (sum of the weights, weighted sum of kv) of a group of tokens, [D] each."""
    weight = tl.exp(score - peak[None, :])
    total = halving_tree_rows(weight, GROUP, D, GROUP_LEVELS)
    return total, halving_tree_rows(kv * weight, GROUP, D, GROUP_LEVELS)


@triton.jit
def _entry(
    row,  # [GROUP] the entry's first rows
    position,
    norm,  # [D] of weight_ptr
    state_ptr,
    rows_ptr,  # of the entry
    cos_ptr,
    sin_ptr,
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
    """Return one entry, [D] fp32, before its rounding."""
    if TOKENS == GROUP:
        score, kv = _load_group(state_ptr, row, 0, D, W, RATIO, OVERLAP, GROUP, WITH_KV=True)
    # Before the sums, whose barriers would hold these loads back.
    pair = tl.arange(0, D // 2) - (D // 2 - HALF)
    position = position.to(tl.int64)
    known = (pair >= 0) & (position >= 0) & (position < max_position)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=known, other=float("nan"))
    sin = tl.load(sin_ptr + position * HALF + pair, mask=known, other=float("nan"))
    peak = tl.full((D,), LOWEST, tl.float32)
    if TOKENS == GROUP:
        peak = tl.maximum(peak, tl.max(score, 0))
        total, pooled = _group_sums(score, kv, peak, D, GROUP, GROUP_LEVELS)
    else:
        token = tl.arange(0, GROUP)
        for start in range(0, TOKENS, GROUP):
            row = tl.load(rows_ptr + start + token)
            score, _ = _load_group(
                state_ptr, row, start, D, W, RATIO, OVERLAP, GROUP, WITH_KV=False
            )
            peak = tl.maximum(peak, tl.max(score, 0))
        total = tl.zeros((D,), tl.float32)
        pooled = tl.zeros((D,), tl.float32)
        for start in range(0, TOKENS, GROUP):
            row = tl.load(rows_ptr + start + token)
            score, kv = _load_group(
                state_ptr, row, start, D, W, RATIO, OVERLAP, GROUP, WITH_KV=True
            )
            group_total, group_pooled = _group_sums(score, kv, peak, D, GROUP, GROUP_LEVELS)
            total += group_total
            pooled += group_pooled
    pooled = tl.div_rn(pooled, tl.where(total > 0, total, 1.0))
    squares = halving_tree_sum_by_pairs(pooled * pooled, D, LEVELS)
    mean = tl.div_rn(tl.full((1,), squares, tl.float32), tl.full((1,), D, tl.float32))
    rstd = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(mean + norm_eps))
    normed = pooled * tl.broadcast_to(rstd, (D,)) * norm

    even, odd = tl.split(tl.reshape(normed, (D // 2, 2)))
    turned_even = tl.where(pair >= 0, even * cos - odd * sin, even)
    turned_odd = tl.where(pair >= 0, odd * cos + even * sin, odd)
    # + 0.0: an absent entry is +0, whatever the sign of the weight.
    return tl.interleave(turned_even, turned_odd) + 0.0


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
    row = tl.load(rows_ptr + entry * TOKENS + tl.arange(0, GROUP))
    position = tl.load(positions_ptr + entry)
    norm = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)
    out = _entry(
        row, position, norm, state_ptr, rows_ptr + entry * TOKENS, cos_ptr, sin_ptr, norm_eps,
        max_position, TOKENS, RATIO, OVERLAP, D, W, HALF, GROUP, GROUP_LEVELS, LEVELS,
    )  # fmt: skip
    tl.store(out_ptr + entry * D + tl.arange(0, D), out.to(out_ptr.dtype.element_ty))


@triton.jit(
    do_not_specialize=["norm_eps", "max_position"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def _compress_to_cache_kernel(
    state_ptr,
    rows_ptr,
    positions_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,  # bytes
    slots_ptr,  # [E]
    norm_eps,
    max_position,
    block_stride,
    TOKENS: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_LEVELS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8_VALUES: tl.constexpr,
    BF16_VALUES: tl.constexpr,
    QUANT_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOKEN_STEP: tl.constexpr,
    BF16_AT: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    SCALE_AT: tl.constexpr,
    SCALE_ROOM: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    SCALE_FLOOR_LAST: tl.constexpr,
    UE8M0: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + entry).to(tl.int64)
    # Before the slot is known: one wait for memory less.
    row = tl.load(rows_ptr + entry * TOKENS + tl.arange(0, GROUP))
    position = tl.load(positions_ptr + entry)
    norm = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)
    if slot >= 0:
        out = _entry(
            row, position, norm, state_ptr, rows_ptr + entry * TOKENS, cos_ptr, sin_ptr, norm_eps,
            max_position, TOKENS, RATIO, OVERLAP, D, W, HALF, GROUP, GROUP_LEVELS, LEVELS,
        )  # fmt: skip
        # The rounding that `compress` ends with and `write_kv_fp8` begins with.
        kept = out.to(tl.bfloat16).to(tl.int16, bitcast=True)
        block_ptr, token = slot_address(cache_ptr, slot, block_stride, BLOCK_SIZE)
        groups = tl.arange(0, GROUPS_PADDED)
        columns = groups[:, None] * QUANT_GROUP + tl.arange(0, QUANT_GROUP)[None, :]
        store_fp8_groups(
            widen(tl.reshape(kept, (GROUPS_PADDED, QUANT_GROUP))), columns, columns < FP8_VALUES,
            block_ptr, token, QUANT_GROUP, GROUPS, GROUPS_PADDED, TOKEN_STEP, SCALE_STEP, SCALE_AT,
            SCALE_ROOM, SCALE_BYTES, SCALE_FLOOR_LAST, UE8M0,
        )  # fmt: skip
        if BF16_VALUES > 0:
            column = tl.arange(0, D)
            rope_ptr = (block_ptr + token * TOKEN_STEP + BF16_AT).to(tl.pointer_type(tl.int16))
            tl.store(rope_ptr + (column - FP8_VALUES), kept, mask=column >= FP8_VALUES)


# One addition an element has the same bits in every form, so this kernel may specialize.
@triton.jit
def _write_state_kernel(
    kv_score_ptr,  # [T, 2 W] fp32, row stride stride
    bias_ptr,  # [ratio, W] fp32
    positions_ptr,  # [T]
    slots_ptr,  # [T], -1 for none
    cache_ptr,  # [N, 2 W] fp32 contiguous
    stride,
    RATIO: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    # Before the slot is known: one wait for memory less.
    column = tl.arange(0, BLOCK)
    inside = column < W
    row = tl.load(positions_ptr + token) % RATIO
    kv = tl.load(kv_score_ptr + token * stride + column, mask=inside)
    score = tl.load(kv_score_ptr + token * stride + W + column, mask=inside)
    if slot >= 0:
        bias = tl.load(bias_ptr + row * W + column, mask=inside)
        tl.store(cache_ptr + slot * 2 * W + column, kv, mask=inside)
        tl.store(cache_ptr + slot * 2 * W + W + column, score + bias, mask=inside)


def _launch_facts(params: CompressorParameters, half: int) -> dict[str, int]:
    size, group = params.head_dim, min(GROUP, params.tokens)
    if size & (size - 1):
        raise UnsupportedError("compress", f"head_dim {size} by impl 'triton'", ["a power of two"])
    return {
        "TOKENS": params.tokens,
        "RATIO": params.ratio,
        "OVERLAP": params.overlap,
        "D": size,
        "W": params.state_width,
        "HALF": half,
        "GROUP": group,
        "GROUP_LEVELS": group.bit_length() - 1,
        "LEVELS": size.bit_length() - 1,
        "num_warps": num_warps(size),
    }


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
    facts = _launch_facts(params, cos.shape[1])
    out = torch.empty((rows.shape[0], params.head_dim), dtype=dtype, device=state.device)
    if rows.shape[0]:
        _compress_fwd_kernel[(rows.shape[0],)](
            aligned(state), aligned(rows.contiguous()), positions.contiguous(),
            aligned(weight.contiguous()), cos, sin, out, params.norm_eps, cos.shape[0],
            enable_fp_fusion=False, **facts,
        )  # fmt: skip
    return out


def compress_to_cache_fwd(
    state: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    params: CompressorParameters,
    layout: KVLayout,
) -> None:
    """Launch the kernel that forms entries and stores them; see `compress_to_cache`."""
    check_alignment("compress_to_cache", cache)
    facts = _launch_facts(params, cos.shape[1])
    quantized = write_constants(layout, cache.shape[1], "ue8m0")
    quantized["QUANT_GROUP"] = quantized.pop("GROUP")
    if rows.shape[0]:
        _compress_to_cache_kernel[(rows.shape[0],)](
            aligned(state), aligned(rows.contiguous()), positions.contiguous(),
            aligned(weight.contiguous()), cos, sin, cache, slots.contiguous(), params.norm_eps,
            cos.shape[0], cache.stride(0), enable_fp_fusion=False,
            **facts, **quantized,
        )  # fmt: skip


def write_state_fwd(
    kv_score: torch.Tensor,
    position_bias: torch.Tensor,
    positions: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Launch the write; see `write_compressor_state`."""
    tokens = kv_score.shape[0]
    ratio, half = position_bias.shape
    if tokens:
        rows = aligned_rows(kv_score)
        _write_state_kernel[(tokens,)](
            rows, position_bias.contiguous(), positions.contiguous(), slots.contiguous(),
            cache, rows.stride(0),
            RATIO=ratio, W=half, BLOCK=triton.next_power_of_2(half), num_warps=num_warps(half),
        )  # fmt: skip
