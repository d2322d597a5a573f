"""Hyper-connection maps in Triton: a fixed-cut GEMM for the mixes, then row-local maps.

fn is fp32 and x is bf16. A product of the two on tensor cores takes fn as three bf16 terms, whose
sum is fn; each term has its own accumulator.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.hyper_connections.spec import (
    K_PART,
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
from consistent_kernels.triton_tree import halving_tree_rows


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


@triton.jit
def _hc_terms_kernel(
    fn_ptr,  # [N, K] fp32 contiguous
    terms_ptr,  # [3, N, K]
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    place = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = place < N * K
    weight = tl.load(fn_ptr + place, mask=inside, other=0.0)
    terms = _terms(weight, terms_ptr.dtype.element_ty)
    for term in tl.static_range(3):
        tl.store(terms_ptr + term * N * K + place, terms[term], mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _hc_mix_fwd_kernel(
    x_ptr,  # [T, K] bf16, row stride x_stride
    fn_ptr,  # [N, K] fp32 contiguous, or its terms [3, N, K]
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
    LOADED: tl.constexpr,
    TERMS: tl.constexpr,
):
    if OVERLAP and TERMS:
        gdc_wait()
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
        first = tl.load(fn_rows + k[None, :], mask=fn_inside, other=0.0)
        if TERMS:
            second = tl.load(fn_rows + N * K + k[None, :], mask=fn_inside, other=0.0)
            third = tl.load(fn_rows + 2 * N * K + k[None, :], mask=fn_inside, other=0.0)
        x = tl.load(x_rows + k[None, :], mask=x_inside, other=0.0)
        if PARTS == 1:
            tl.debug_barrier()  # or ptxas delays some loads until it has converted others
            if OVERLAP and LOADED:
                gdc_launch_dependents()
        if not TERMS:
            first, second, third = _terms(first, x.dtype)
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
    if OVERLAP and not EARLY and not LOADED:
        gdc_launch_dependents()
    if PARTS <= RUN_PARTS:
        total, square_total = run, square_run
    at = part_ptr + (entry.to(tl.int64) * tokens + rows) * BLOCK_N
    tl.store(at[:, None] + columns[None, :], total, mask=inside[:, None] & (columns < N)[None, :])
    tl.store(at + N, square_total, mask=inside)


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


def _block_n(count: int) -> int:
    # One column more than the mixes: the sum of squares.
    return max(16, triton.next_power_of_2(count + 1))


def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


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
    if mix.terms:
        fn = _terms_of(fn, flat.dtype, overlap)
    _hc_mix_fwd_kernel[(triton.cdiv(tokens, mix.row_tile), entries)](
        flat, fn, part, tokens, flat.stride(0),
        K=inner, N=count, BLOCK_N=block_n, ROW_TILE=mix.row_tile, K_PART=K_PART,
        PART_LEVELS=K_PART.bit_length() - 4, RUN_PARTS=RUN_PARTS, PARTS=mix.parts, OVERLAP=overlap,
        EARLY=mix.early, LOADED=mix.loaded, TERMS=mix.terms, num_warps=mix.warps,
        num_stages=mix.stages, enable_fp_fusion=False,
        **({"launch_pdl": True} if overlap and mix.terms else {}),
    )  # fmt: skip
    return part


def _terms_of(fn: torch.Tensor, dtype: torch.dtype, overlap: bool) -> torch.Tensor:
    """Launch the cut of fn into the three terms that the mix kernel multiplies; [3, N, K]."""
    count, inner = fn.shape
    terms = torch.empty((3, count, inner), dtype=dtype, device=fn.device)
    block = 1024
    _hc_terms_kernel[(triton.cdiv(count * inner, block),)](
        fn, terms, K=inner, N=count, BLOCK_K=block, OVERLAP=overlap,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return terms


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
