"""The draw of a token on CUDA from the log-prob's partial results: one program a row.

The draw is no part of the contract. Cumulative masses are fp64, first over tiles of the vocabulary,
then over the ids of one tile, so the logits are read by the partial results and for one tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.token_logprobs.spec import SMALLEST_DELTA, VOCAB_TILE

_NUM_WARPS = 4


@triton.jit
def _first_above(mass, index, target, COUNT: tl.constexpr):
    """(first index up to which there is more mass than target, the mass before it).

    The last index that has mass where rounding leaves none, or 0 where there is no mass at all.
    """
    upto = tl.cumsum(mass, 0)
    first = tl.min(tl.where(upto > target, index, COUNT), 0)
    last = tl.max(tl.where(mass > 0, index, 0), 0)
    found = tl.where(first < COUNT, first, last)
    before = tl.sum(tl.where(index == found - 1, upto, 0.0), 0)
    return found, before


@triton.jit(
    do_not_specialize=["logits_stride", "vocab", "tiles", "rows"],
    do_not_specialize_on_alignment=["logits_ptr", "temperature_ptr", "uniform_ptr"],
)
def _draw_fwd_kernel(
    logits_ptr,  # [rows, V] fp32, row stride logits_stride
    temperature_ptr,  # [rows] fp32
    partials_ptr,  # [2 or more, rows, tiles] fp32: m, s
    uniform_ptr,  # [rows] fp64 in [0, 1)
    out_ptr,  # [rows] int64
    logits_stride,
    vocab,
    tiles,
    rows,
    SMALLEST: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILES)
    m_ptr = partials_ptr + row * tiles
    m = tl.load(m_ptr + at, mask=at < tiles, other=-float("inf"))
    s = tl.load(m_ptr + rows.to(tl.int64) * tiles + at, mask=at < tiles, other=0.0)
    highest = tl.max(m, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    mass = (s * tl.exp(tl.maximum(m - base, SMALLEST))).to(tl.float64)
    target = tl.load(uniform_ptr + row) * tl.sum(mass, 0)
    tile, before = _first_above(mass, at, target, TILES)
    inside = tl.arange(0, TILE)
    ids = tile * TILE + inside
    logits = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < vocab, other=-float("inf"))
    temperature = tl.load(temperature_ptr + row)
    by = tl.where(temperature == 0.0, 1.0, temperature)
    z = tl.div_rn(logits, tl.broadcast_to(by, (TILE,)))
    weight = tl.where(z == -float("inf"), 0.0, tl.exp(z - base)).to(tl.float64)
    token, _ = _first_above(weight, inside, target - before, TILE)
    # A row of NaN draws an id too: the next step's embedding must exist.
    drawn = tl.minimum(tile * TILE + token, vocab - 1)
    tl.store(out_ptr + row, drawn.to(tl.int64))


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    partials: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Sample one token a row from softmax(logits / temperature).

    Args:
        logits: [T, V] fp32 of unit column stride; -inf is never drawn.
        temperature: [T] fp32; 0 means 1.
        partials: of `triton.tile_partials` for these logits and temperatures, without masks.
        uniform: [T] fp64 in [0, 1).

    Returns:
        [T] int64, in [0, V) also for a row of NaN.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    tiles = partials.shape[2]
    _draw_fwd_kernel[(rows,)](
        logits,
        temperature.contiguous(),
        partials,
        uniform.contiguous(),
        out,
        logits.stride(0),
        vocab,
        tiles,
        rows,
        SMALLEST=SMALLEST_DELTA,
        TILE=VOCAB_TILE,
        TILES=triton.next_power_of_2(tiles),
        num_warps=_NUM_WARPS,
    )
    return out
