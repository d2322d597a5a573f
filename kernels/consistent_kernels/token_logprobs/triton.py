"""Token log-probs in Triton: one program a (row, vocabulary tile), then one ordered merge a row.

Contraction of products and sums to fma is off: the compiler would fold exp's last product into the
first additions in the variant without entropy and not in the other, and their bits would differ.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from consistent_kernels.token_logprobs.spec import NUM_WARPS, SMALLEST_DELTA, VOCAB_TILE
from consistent_kernels.triton_tree import halving_tree_sum

_IDS_BLOCK = 16
_MERGE_BLOCK = 256


@triton.jit
def _divisor(temperature_ptr, row):
    temperature = tl.load(temperature_ptr + row)
    return tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def _finite_base(maximum):
    # A tile of masked ids has maximum -inf; -inf - -inf would be NaN.
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def _bounded(delta, SMALLEST: tl.constexpr):
    # NaN (from NaN or +inf logits) must pass: a plain maximum would drop it.
    return tl.maximum(delta, SMALLEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(
    do_not_specialize=["logits_stride", "valid_vocab", "tiles", "rows"],
    do_not_specialize_on_alignment=["logits_ptr", "temperature_ptr", "banned_ptr", "partials_ptr"],
)
def _tile_partials_fwd_kernel(
    logits_ptr,  # [rows, V] fp32, row stride logits_stride
    temperature_ptr,  # [rows] fp32
    banned_ptr,  # [V] bytes or unused
    partials_ptr,  # [3, rows, tiles] fp32: m, s, w
    logits_stride,
    valid_vocab,
    tiles,
    rows,
    HAS_BANNED: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    SMALLEST: tl.constexpr,
    TILE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    ids = tile * TILE + tl.arange(0, TILE)
    allowed = ids < valid_vocab
    logits = tl.load(logits_ptr + row * logits_stride + ids, mask=allowed, other=-float("inf"))
    z = tl.div_rn(logits, tl.broadcast_to(_divisor(temperature_ptr, row), (TILE,)))
    if HAS_BANNED:
        banned = tl.load(banned_ptr + ids, mask=allowed, other=1)
        z = tl.where(banned != 0, -float("inf"), z)
    m = tl.max(z, 0)
    delta = _bounded(z - _finite_base(m), SMALLEST)
    weight = libdevice.exp(delta)
    here = partials_ptr + row * tiles + tile + tl.arange(0, 1)
    plane = rows.to(tl.int64) * tiles
    tl.store(here, tl.broadcast_to(m, (1,)))
    tl.store(here + plane, halving_tree_sum(weight, TILE, LEVELS))
    if HAS_ENTROPY:
        tl.store(here + 2 * plane, halving_tree_sum(weight * delta, TILE, LEVELS))


@triton.jit(
    do_not_specialize=["logits_stride", "vocab", "valid_vocab", "tiles", "rows", "k"],
    do_not_specialize_on_alignment=[
        "logits_ptr",
        "ids_ptr",
        "temperature_ptr",
        "banned_ptr",
        "partials_ptr",
        "logprob_ptr",
        "logsumexp_ptr",
        "entropy_ptr",
    ],
)
def _merge_fwd_kernel(
    logits_ptr,  # [rows, V] fp32, row stride logits_stride
    ids_ptr,  # [rows, k] int64
    temperature_ptr,  # [rows] fp32
    banned_ptr,  # [V] bytes or unused
    partials_ptr,  # [3, rows, tiles] fp32: m, s, w
    logprob_ptr,  # [rows, k] fp32
    logsumexp_ptr,  # [rows] fp32
    entropy_ptr,  # [rows] fp32 or unused
    logits_stride,
    vocab,
    valid_vocab,
    tiles,
    rows,
    k,
    HAS_BANNED: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    SMALLEST: tl.constexpr,
    MERGE_BLOCK: tl.constexpr,
    IDS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    m_ptr = partials_ptr + row * tiles
    plane = rows.to(tl.int64) * tiles
    maxima = tl.full((MERGE_BLOCK,), -float("inf"), tl.float32)
    for start in range(0, tiles, MERGE_BLOCK):
        at = start + tl.arange(0, MERGE_BLOCK)
        maxima = tl.maximum(maxima, tl.load(m_ptr + at, mask=at < tiles, other=-float("inf")))
    maximum = tl.max(maxima, 0)
    base = _finite_base(maximum)
    total = tl.zeros((1,), tl.float32)
    mean = tl.zeros((1,), tl.float32)
    one = tl.arange(0, 1)
    # Ascending tiles; the loads and exps of a few steps are in flight, the additions are a chain.
    for tile in tl.range(0, tiles, loop_unroll_factor=8):
        delta = _bounded(tl.load(m_ptr + tile + one) - base, SMALLEST)
        scale = libdevice.exp(delta)
        s = tl.load(m_ptr + plane + tile + one)
        total += s * scale
        if HAS_ENTROPY:
            w = tl.load(m_ptr + 2 * plane + tile + one)
            mean += (w + delta * s) * scale
    log_total = libdevice.log(total)
    logsumexp = maximum + log_total
    tl.store(logsumexp_ptr + row + one, logsumexp)
    if HAS_ENTROPY:
        tl.store(entropy_ptr + row + one, log_total - tl.div_rn(mean, total))
    divisor = tl.broadcast_to(_divisor(temperature_ptr, row), (IDS_BLOCK,))
    for start in range(0, k, IDS_BLOCK):
        column = start + tl.arange(0, IDS_BLOCK)
        asked = column < k
        token = tl.load(ids_ptr + row * k + column, mask=asked, other=-1)
        exists = (token >= 0) & (token < vocab)
        logit = tl.load(logits_ptr + row * logits_stride + token, mask=exists, other=float("nan"))
        z = tl.where(exists & (token >= valid_vocab), -float("inf"), tl.div_rn(logit, divisor))
        if HAS_BANNED:
            banned = tl.load(banned_ptr + token, mask=exists, other=0)
            z = tl.where(banned != 0, -float("inf"), z)
        logprob = z - tl.broadcast_to(logsumexp, (IDS_BLOCK,))
        tl.store(logprob_ptr + row * k + column, logprob, mask=asked)


def partials_shape(rows: int, valid_vocab: int) -> tuple[int, int, int]:
    """Return the shape of what `tile_partials` gives."""
    return 3, rows, triton.cdiv(valid_vocab, VOCAB_TILE)


def _variant(banned: torch.Tensor | None, entropy: bool) -> dict[str, Any]:
    return {
        "HAS_BANNED": banned is not None,
        "HAS_ENTROPY": entropy,
        "SMALLEST": SMALLEST_DELTA,
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": False,
    }


def tile_partials(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None = None,
    *,
    entropy: bool = False,
) -> torch.Tensor:
    """Per tile of 1024 ids: m = max z, s = sum exp(z - m), w = sum exp(z - m) (z - m).

    Args:
        logits: [T, V] fp32 of unit column stride; T is at least 1.
        temperature: [T] fp32 contiguous; 0 means 1.
        valid_vocab: ids from here on are -inf; banned: bool [V] or None.
        entropy: whether w is computed; else it is not written.

    Returns:
        [3, T, tiles] fp32.
    """
    rows = logits.shape[0]
    partials = torch.empty(
        partials_shape(rows, valid_vocab), dtype=torch.float32, device=logits.device
    )
    tiles = partials.shape[2]
    _tile_partials_fwd_kernel[(rows * tiles,)](
        logits,
        temperature,
        banned.view(torch.uint8) if banned is not None else logits,
        partials,
        logits.stride(0),
        valid_vocab,
        tiles,
        rows,
        TILE=VOCAB_TILE,
        LEVELS=VOCAB_TILE.bit_length() - 1,
        **_variant(banned, entropy),
    )
    return partials


def token_logprobs_fwd(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    valid_vocab: int,
    banned: torch.Tensor | None,
    entropy: bool,
    partials: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Launch the two kernels.

    Args:
        logits: [T, V] fp32.
        ids: [T, k] int64; outside [0, V) gives NaN.
        temperature: [T] fp32; 0 means 1.
        valid_vocab: ids from here on are -inf.
        banned: bool [V] or None.
        entropy: whether to compute it.
        partials: of `tile_partials` with the same arguments; computed where it is None.

    Returns:
        (logprob [T, k], logsumexp [T], entropy [T] or None), fp32.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids, temperature = ids.contiguous(), temperature.contiguous()
    rows, k = ids.shape
    logprob = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    logsumexp = torch.empty(rows, dtype=torch.float32, device=logits.device)
    uncertainty = torch.empty_like(logsumexp) if entropy else None
    if not rows:
        return logprob, logsumexp, uncertainty
    if partials is None:
        partials = tile_partials(logits, temperature, valid_vocab, banned, entropy=entropy)
    _merge_fwd_kernel[(rows,)](
        logits,
        ids,
        temperature,
        banned.view(torch.uint8) if banned is not None else ids,
        partials,
        logprob,
        logsumexp,
        uncertainty if uncertainty is not None else logsumexp,
        logits.stride(0),
        logits.shape[1],
        valid_vocab,
        partials.shape[2],
        rows,
        k,
        MERGE_BLOCK=_MERGE_BLOCK,
        IDS_BLOCK=_IDS_BLOCK,
        **_variant(banned, entropy),
    )
    return logprob, logsumexp, uncertainty
