"""Hyper-connection maps in Triton: the mixes of `triton_mix.py`, then row-local maps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.hyper_connections.spec import (
    RUN_PARTS,
    SPAN_RUNS,
    MapSchedule,
    MixSchedule,
    map_schedule,
    mix_schedule,
)
from consistent_kernels.hyper_connections.triton_maps import (
    columns_divided,
    columns_of,
    has_safe_eps,
    rows_divided,
    rstd,
    sigmoid,
)
from consistent_kernels.hyper_connections.triton_mix import hc_mix_fwd
from consistent_kernels.triton_tree import halving_tree_rows


@triton.jit
def _spans(
    part_ptr,
    places,  # [COUNT]: token * BLOCK_N + column
    stride,  # tokens * BLOCK_N
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    RUN_PARTS: tl.constexpr,
    SPAN_PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPANS: tl.constexpr,
):
    """Finish the spans that the mix kernel began: add the entries of each place; [SPANS, COUNT]."""
    SPAN_ENTRIES: tl.constexpr = SPAN_PARTS // PARTS
    RUN_ENTRIES: tl.constexpr = RUN_PARTS // PARTS if PARTS < RUN_PARTS else 1
    first = tl.arange(0, SPANS) * SPAN_ENTRIES
    base = part_ptr + first.to(tl.int64)[:, None] * stride + places[None, :]
    total = tl.zeros((SPANS, COUNT), tl.float32)
    for start in tl.static_range(0, SPAN_ENTRIES, RUN_ENTRIES):
        run = tl.zeros((SPANS, COUNT), tl.float32)
        for entry in tl.static_range(start, start + RUN_ENTRIES):
            at = base + stride.to(tl.int64) * entry
            if SPANS * SPAN_ENTRIES == ENTRIES:
                run += tl.load(at)
            else:
                run += tl.load(at, mask=(first + entry < ENTRIES)[:, None], other=0.0)
        if PARTS >= SPAN_PARTS:
            total = run
        else:
            total += run
    return total


@triton.jit
def _comb(
    part_ptr,
    scale_ptr,
    base_ptr,
    comb_ptr,
    first,  # of COMB_TOKENS tokens
    tokens,
    norm_eps,
    eps,
    K: tl.constexpr,
    S: tl.constexpr,
    STREAM_LEVELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    RUN_PARTS: tl.constexpr,
    SPAN_PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN_LEVELS: tl.constexpr,
    COMB_TOKENS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SAFE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    places = tl.arange(0, COMB_TOKENS * S * S)
    # A token that is not there repeats the last one, and is not stored.
    token = tl.minimum(first + places // (S * S), tokens - 1)
    column = 2 * S + places % (S * S)
    base = tl.load(base_ptr + column)
    scale = tl.load(scale_ptr + 2)
    if OVERLAP:
        gdc_wait()
    # Eight copies of each sum of squares: a lane loads one value, not one lane all.
    copies = tl.arange(0, COMB_TOKENS * 8)
    owner = tl.minimum(first + copies // 8, tokens - 1)
    mixes = _spans(
        part_ptr, token * BLOCK_N + column, tokens * BLOCK_N, COMB_TOKENS * S * S,
        PARTS, RUN_PARTS, SPAN_PARTS, ENTRIES, SPANS,
    )  # fmt: skip
    squares = _spans(
        part_ptr, owner * BLOCK_N + N, tokens * BLOCK_N, COMB_TOKENS * 8,
        PARTS, RUN_PARTS, SPAN_PARTS, ENTRIES, SPANS,
    )  # fmt: skip
    # Loads of both come before the trees, which pass through shared memory.
    squares = halving_tree_rows(squares, SPANS, COMB_TOKENS * 8, SPAN_LEVELS)
    squares = tl.reshape(tl.where(copies % 8 == 0, squares, 0.0), (COMB_TOKENS, 8))
    square_sum = tl.sum(squares, 1)  # of one value and zeros
    mixes = halving_tree_rows(mixes, SPANS, COMB_TOKENS * S * S, SPAN_LEVELS)
    norm = tl.broadcast_to(rstd(square_sum, norm_eps, K)[:, None], (COMB_TOKENS, S * S))
    logits = mixes * tl.reshape(norm, (COMB_TOKENS * S * S,)) * scale + base
    comb = columns_of(logits, COMB_TOKENS, S)
    peak = comb[0]
    for stream in tl.static_range(1, S):
        peak = tl.maximum(peak, comb[stream])
    exponents = ()
    for stream in tl.static_range(S):
        exponents += (tl.exp(comb[stream] - peak),)
    softmax = rows_divided(exponents, 0.0, S, STREAM_LEVELS, SAFE)
    comb = ()
    for stream in tl.static_range(S):
        comb += (softmax[stream] + eps,)
    comb = columns_divided(comb, eps, COMB_TOKENS, S, SAFE)
    for _ in range(ITERATIONS - 1):
        comb = rows_divided(comb, eps, S, STREAM_LEVELS, SAFE)
        comb = columns_divided(comb, eps, COMB_TOKENS, S, SAFE)
    row = first * S + tl.arange(0, COMB_TOKENS * S)
    for stream in tl.static_range(S):
        tl.store(comb_ptr + row * S + stream, comb[stream], mask=row < tokens.to(tl.int64) * S)


@triton.jit
def _layer_input(
    x_ptr,
    part_ptr,
    scale_ptr,
    base_ptr,
    input_ptr,
    post_ptr,
    token,
    block,
    tokens,
    x_stride,
    norm_eps,
    eps,
    post_multiplier,
    H: tl.constexpr,
    S: tl.constexpr,
    STREAM_LEVELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    RUN_PARTS: tl.constexpr,
    SPAN_PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN_LEVELS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_POST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    streams = tl.arange(0, S)
    columns = block * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = columns < H
    x = tl.load(
        x_ptr + token * x_stride + streams[:, None] * H + columns[None, :],
        mask=inside[None, :],
        other=0.0,
    )
    base = tl.load(base_ptr + streams)
    scale = tl.load(scale_ptr)
    if OVERLAP:
        gdc_wait()
    both = tl.arange(0, 2 * S)
    sums = _spans(
        part_ptr, token * BLOCK_N + tl.where(both < S, both, N), tokens * BLOCK_N, 2 * S,
        PARTS, RUN_PARTS, SPAN_PARTS, ENTRIES, SPANS,
    )  # fmt: skip
    sums = halving_tree_rows(sums, SPANS, 2 * S, SPAN_LEVELS)
    mixes, _ = tl.split(tl.trans(tl.reshape(sums, (2, S))))
    # All others are zeros: this is the one value, in any order of additions, and a scalar.
    square_sum = tl.sum(tl.where(both == S, sums, 0.0), 0)
    norm = tl.broadcast_to(rstd(tl.full((1,), square_sum, tl.float32), norm_eps, S * H), (S,))
    weight = sigmoid(mixes * norm * scale + base) + eps
    total = halving_tree_rows(weight[:, None] * x.to(tl.float32), S, BLOCK_H, STREAM_LEVELS)
    tl.store(input_ptr + token * H + columns, total.to(input_ptr.dtype.element_ty), mask=inside)
    if HAS_POST:  # noqa: SIM102 (decided at compile time)
        if block == 0:
            # Twice the columns, or a lane loads several.
            post = _spans(
                part_ptr, token * BLOCK_N + S + both % S, tokens * BLOCK_N, 2 * S,
                PARTS, RUN_PARTS, SPAN_PARTS, ENTRIES, SPANS,
            )  # fmt: skip
            post = halving_tree_rows(post, SPANS, 2 * S, SPAN_LEVELS)
            post, _ = tl.split(tl.trans(tl.reshape(post, (2, S))))
            logits = post * norm * tl.load(scale_ptr + 1) + tl.load(base_ptr + S + streams)
            tl.store(post_ptr + token * S + streams, sigmoid(logits) * post_multiplier)


@triton.jit(do_not_specialize=["tokens", "norm_eps", "eps", "post_multiplier"])
def _hc_map_fwd_kernel(
    x_ptr,  # [T, S, H] bf16, token stride x_stride
    part_ptr,  # [ENTRIES, T, BLOCK_N] fp32
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
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    RUN_PARTS: tl.constexpr,
    SPAN_PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPANS: tl.constexpr,
    SPAN_LEVELS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    COMB_TOKENS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    HAS_COMB: tl.constexpr,
    SAFE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    comb_programs = tl.cdiv(tokens, COMB_TOKENS) if HAS_COMB else 0
    # Sinkhorn is one long chain of divisions: it starts first, and the others run beside it.
    if HAS_COMB and program < comb_programs:
        _comb(
            part_ptr, scale_ptr, base_ptr, comb_ptr, program.to(tl.int64) * COMB_TOKENS, tokens,
            norm_eps, eps, S * H, S, STREAM_LEVELS, N, BLOCK_N, PARTS, RUN_PARTS, SPAN_PARTS,
            ENTRIES, SPANS, SPAN_LEVELS, COMB_TOKENS, ITERATIONS, SAFE, OVERLAP,
        )  # fmt: skip
    else:
        # Backwards: the mix kernel read the last tokens last, and some are still in the cache.
        token = tokens - 1 - (program - comb_programs) // BLOCKS
        _layer_input(
            x_ptr, part_ptr, scale_ptr, base_ptr, input_ptr, post_ptr, token.to(tl.int64),
            (program - comb_programs) % BLOCKS, tokens, x_stride, norm_eps, eps, post_multiplier,
            H, S, STREAM_LEVELS, N, BLOCK_N, PARTS, RUN_PARTS, SPAN_PARTS,
            ENTRIES, SPANS, SPAN_LEVELS, BLOCK_H, HAS_COMB, OVERLAP,
        )  # fmt: skip


def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


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
    mix: MixSchedule | None = None,
    maps: MapSchedule | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the mixes and the maps of `hc_pre`, or of `hc_head` (no comb).

    Args:
        x: [T, S, H] bf16; fn: [N, S * H] fp32; scale: [1] or [3] fp32; base: [N] fp32.
        mix, maps: schedules other than the pinned ones.

    Returns:
        (layer_input [T, H], post [T, S] fp32, comb [T, S, S] fp32); the last two are
        empty without comb.
    """
    tokens, streams, hidden = x.shape
    count = fn.shape[0]
    mix = mix or mix_schedule(tokens, count, hopper=_major(x.device) == 9)
    maps = maps or map_schedule(tokens, count)
    device = x.device
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=device)
    shapes = ((tokens, streams), (tokens, streams, streams)) if has_comb else ((0,), (0,))
    post, comb = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    if tokens == 0:
        return out, post, comb
    flat, fn = aligned_rows(x.flatten(1)), aligned(fn.contiguous())
    # Before the mix kernel: nothing may come between the two.
    scale, base = aligned(scale.contiguous()), aligned(base.contiguous())
    overlap = maps.overlap and _major(device) >= 9
    part = hc_mix_fwd(flat, fn, mix, overlap)
    launch_maps(
        flat, part, scale, base, (out, post, comb), norm_eps, eps, iterations, post_multiplier,
        mix, maps, overlap,
    )  # fmt: skip
    return out, post, comb


def launch_maps(
    flat: torch.Tensor,
    part: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    norm_eps: float,
    eps: float,
    iterations: int,
    post_multiplier: float,
    mix: MixSchedule,
    maps: MapSchedule,
    overlap: bool,
) -> None:
    """Launch the maps of the sums that `hc_mix_fwd` returned under the schedule `mix`.

    Args:
        flat: [T, S * H] bf16; outputs: as `hc_map_fwd` returns them; an empty comb is not formed.
        overlap: what `hc_mix_fwd` was given.
    """
    out, post, comb = outputs
    tokens, hidden = out.shape
    streams, count = flat.shape[1] // hidden, base.shape[0]
    entries, _, block_n = part.shape
    span_parts = RUN_PARTS * SPAN_RUNS
    spans = triton.next_power_of_2(triton.cdiv(entries * mix.parts, span_parts))
    has_comb = comb.numel() > 0
    programs = tokens * triton.cdiv(hidden, maps.hidden_block)
    if has_comb:
        programs += triton.cdiv(tokens, maps.comb_tokens)
    _hc_map_fwd_kernel[(programs,)](
        flat, part, scale, base, out, post, comb,
        tokens, flat.stride(0), norm_eps, eps, post_multiplier,
        H=hidden, S=streams, STREAM_LEVELS=streams.bit_length() - 1, N=count, BLOCK_N=block_n,
        PARTS=mix.parts, RUN_PARTS=RUN_PARTS, SPAN_PARTS=span_parts, ENTRIES=entries,
        SPANS=spans, SPAN_LEVELS=spans.bit_length() - 1, BLOCK_H=maps.hidden_block,
        COMB_TOKENS=maps.comb_tokens, ITERATIONS=iterations, HAS_COMB=has_comb,
        SAFE=has_safe_eps(eps), OVERLAP=overlap,
        num_warps=maps.warps, enable_fp_fusion=False,
        **({"launch_pdl": True} if overlap else {}),
        **({"maxnreg": maps.registers} if maps.registers else {}),
    )  # fmt: skip
