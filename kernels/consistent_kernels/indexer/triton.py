"""Index scores in Triton: one binary for pages and for packed keys.

Packed keys are one page without end. A program scores one query against a few tiles of KEY_TILE
keys; a score is one column of one product and a written-down sum over heads, so neither the tile
nor the page that a key lies in can move its bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned
from consistent_kernels.indexer.layout import new_scores
from consistent_kernels.indexer.spec import (
    HEAD_DIM,
    KEY_TILE,
    MIN_PROGRAMS,
    NUM_WARPS,
    TILES,
)
from consistent_kernels.kv_cache_fp8.triton import check_alignment
from consistent_kernels.triton_tree import halving_tree_columns

ENDLESS_PAGE = 1 << 30


# One compiled form: what differs between pages and packed keys is not specialized on, and what
# Triton specializes on (pointers, page_size, page_bytes, out_stride) is a multiple of 16 in both.
@triton.jit(
    do_not_specialize=["columns", "table_stride", "page_scales", "tiles"],
    do_not_specialize_on_alignment=["table_ptr", "requests_ptr", "starts_ptr", "ends_ptr"],
)
def _indexer_scores_kernel(
    q_ptr,  # [T, HEADS, HEAD_DIM] e4m3 bytes, contiguous
    weights_ptr,  # [T, HEADS] fp32, contiguous
    k_ptr,  # e4m3 bytes of token 0 of page 0
    k_scale_ptr,  # fp32 scale of token 0 of page 0
    table_ptr,  # [B, pages] int32
    requests_ptr,  # [T]
    starts_ptr,  # [T]
    ends_ptr,  # [T]
    out_ptr,  # [T, columns] fp32, row stride out_stride
    out_stride,
    columns,
    table_stride,
    page_size,
    page_bytes,
    page_scales,  # fp32 elements from one page's scales to the next one's
    tiles,  # key tiles that a program walks
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LEVELS: tl.constexpr,
    KEY_TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_ptr + row).to(tl.int32)
    end = tl.minimum(tl.load(ends_ptr + row).to(tl.int32), columns)
    begin = tl.program_id(0) * (KEY_TILE * tiles)
    if (begin < end) & (begin + KEY_TILE * tiles > start):
        table_row = table_ptr + tl.load(requests_ptr + row).to(tl.int64) * table_stride
        heads = tl.arange(0, HEADS)
        dims = tl.arange(0, HEAD_DIM)
        q = tl.load(q_ptr + (row * HEADS + heads[None, :]) * HEAD_DIM + dims[:, None])
        q = q.to(tl.float8e4nv, bitcast=True)
        weights = tl.load(weights_ptr + row * HEADS + heads)
        for tile in range(tiles):
            keys = begin + tile * KEY_TILE + tl.arange(0, KEY_TILE)
            inside = (keys >= start) & (keys < end)
            index = keys // page_size
            token = keys - index * page_size
            page = tl.load(table_row + index, mask=inside, other=0).to(tl.int64)
            k_at = k_ptr + page * page_bytes + token.to(tl.int64) * HEAD_DIM
            k = tl.load(k_at[:, None] + dims[None, :], mask=inside[:, None], other=0)
            scale = tl.load(k_scale_ptr + page * page_scales + token, mask=inside, other=0.0)
            dots = tl.dot(k.to(tl.float8e4nv, bitcast=True), q)
            relu = tl.where(dots > 0.0, dots, 0.0)
            total = halving_tree_columns(relu * weights[None, :], KEY_TILE, HEADS, LEVELS)
            tl.store(out_ptr + row * out_stride + keys, total * scale, mask=inside)


def tiles_per_program(tokens: int, columns: int) -> int:
    """Return how many tiles a program walks: fewer where programs would leave processors idle.

    An argument of the one binary; no score follows it.
    """
    tiles = TILES
    while tiles > 1 and tokens * triton.cdiv(columns, KEY_TILE * tiles) < MIN_PROGRAMS:
        tiles //= 2
    return tiles


def _launch(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_bytes: torch.Tensor,
    k_scale: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    page: tuple[int, int, int],
) -> torch.Tensor:
    tokens, heads, _ = q.shape
    columns = out.shape[1]
    if tokens and columns:
        tiles = tiles_per_program(tokens, columns)
        _indexer_scores_kernel[(triton.cdiv(columns, KEY_TILE * tiles), tokens)](
            aligned(q.contiguous()).view(torch.uint8),
            aligned(weights.contiguous()),
            k_bytes,
            k_scale,
            table,
            requests.to(torch.int32).contiguous(),
            starts.to(torch.int32).contiguous(),
            ends.to(torch.int32).contiguous(),
            out,
            out.stride(0),
            columns,
            table.stride(0),
            *page,
            tiles,
            HEADS=heads,
            HEAD_DIM=HEAD_DIM,
            LEVELS=heads.bit_length() - 1,
            KEY_TILE=KEY_TILE,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return out


def indexer_scores_fwd(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel on packed keys; see `indexer_scores`."""
    page_zero = torch.zeros((1, 1), dtype=torch.int32, device=q.device)
    requests = torch.zeros_like(starts)
    return _launch(
        q,
        weights,
        aligned(k.contiguous()).view(torch.uint8),
        aligned(k_scale.contiguous()),
        page_zero,
        requests,
        starts,
        ends,
        new_scores(q, len(k), paged=False),
        (ENDLESS_PAGE, 0, 0),
    )


def indexer_scores_paged_fwd(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor,
    context_lens: torch.Tensor,
    columns: int,
) -> torch.Tensor:
    """Launch the kernel on pages; see `indexer_scores_paged`."""
    check_alignment("indexer_scores_paged", cache)
    blocks, size, token_bytes = cache.shape
    step = cache.stride(0)
    if blocks == 0:  # then every context is empty, and no score is read
        return new_scores(q, columns, paged=True)
    flat = cache.as_strided(((blocks - 1) * step + size * token_bytes,), (1,))
    return _launch(
        q,
        weights,
        flat,
        flat[size * HEAD_DIM :].view(torch.float32),
        block_table,
        requests,
        torch.zeros_like(context_lens),
        context_lens,
        new_scores(q, columns, paged=True),
        (size, step, step // 4),
    )
