"""Sparse attention straight from an FP8 cache by FlashMLA's decode kernel, without its splits.

FlashMLA cuts requests among the device's multiprocessors, and so bits follow the batch. The cut is
data (`tile_scheduler_metadata`), and here it is ours: all queries are one request of many
positions, and one part takes all of it. A query's tiles are then walked from first to last by one
program (csrc/sm90/decode/sparse_fp8/splitkv_mla.cuh), in any phase. Few queries leave
multiprocessors idle.
"""

from __future__ import annotations

import functools

import torch

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.sparse_attention.flash_mla import _padded_heads
from consistent_kernels.sparse_attention.reference import padded_indices
from consistent_kernels.sparse_attention.spec import ENTRY_TILE, FLASH_MLA_HEADS

_ARGUMENTS = 13
QUERIES_PER_CALL = 8192
"""FlashMLA's strides are 32-bit; a query's bits do not depend on how many share a call."""

Cache = tuple[torch.Tensor, torch.Tensor]
"""(pages [blocks, block_size, bytes] uint8, slots [T, K] int32)."""


@functools.lru_cache(maxsize=256)
def _schedule(parts: int, tiles: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tile_scheduler_metadata [parts, 8], num_splits [2]): part 0 does everything.

    A row is (first request, last request, first tile, end tile, first split, is the first request
    split, is the last, padding); a part whose first request is beyond the batch returns at once.
    """
    rows = torch.zeros((parts, 8), dtype=torch.int32)
    rows[:, 0] = rows[:, 1] = 1
    rows[0] = torch.tensor([0, 0, 0, tiles, 0, 0, 0, 0])
    splits = torch.tensor([0, 1], dtype=torch.int32)
    return rows.to(device), splits.to(device)


def _parts(queries: int, heads: int, device: torch.device) -> int:
    """Return how many parts FlashMLA expects (csrc/api/sparse_decode.h, `get_meta`)."""
    properties = torch.cuda.get_device_properties(device)
    groups = heads // 64 if properties.major == 9 else 1
    return max(properties.multi_processor_count // queries // groups, 1)


def sparse_attention_fp8_fwd(
    q: torch.Tensor,
    cache: Cache,
    extra: Cache | None,
    sinks: torch.Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call FlashMLA; see `sparse_attention_fp8`."""
    from consistent_kernels.vendored import flash_mla

    tokens, heads, _ = q.shape
    if heads > max(FLASH_MLA_HEADS):
        raise UnsupportedError(
            "sparse_attention_fp8", f"{heads} heads", [f"at most {max(FLASH_MLA_HEADS)}"]
        )
    if tokens == 0:
        return q.new_empty((0, heads, d_v)), q.new_empty((0, heads), dtype=torch.float32)
    if tokens > QUERIES_PER_CALL:
        results = []
        for begin in range(0, tokens, QUERIES_PER_CALL):
            part = slice(begin, begin + QUERIES_PER_CALL)
            own, more = (
                None if pair is None else (pair[0], pair[1][part]) for pair in (cache, extra)
            )
            results.append(sparse_attention_fp8_fwd(q[part], own, more, sinks, scale, d_v))
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])
    op = flash_mla().sparse_decode_fwd
    count = len(op.default._schema.arguments)
    if count not in (_ARGUMENTS - 1, _ARGUMENTS):
        raise UnsupportedError(
            "sparse_attention_fp8", f"FlashMLA with {count} arguments", ["12 or 13"]
        )
    queries = _padded_heads(q, 1, 0.0).unsqueeze(0)
    padded_sinks = None if sinks is None else _padded_heads(sinks, 0, float("-inf"))
    pages, slots = cache[0].unsqueeze(-2), padded_indices(cache[1], ENTRY_TILE).unsqueeze(0)
    tiles = slots.shape[2] // ENTRY_TILE
    more_pages = more_slots = None
    if extra is not None:
        more_pages = extra[0].unsqueeze(-2)
        more_slots = padded_indices(extra[1], ENTRY_TILE).unsqueeze(0)
        tiles += more_slots.shape[2] // ENTRY_TILE
    metadata, splits = _schedule(_parts(tokens, queries.shape[2], q.device), tiles, q.device)
    arguments = (
        queries, pages, slots, None, padded_sinks, metadata, splits, more_pages, more_slots, None,
        d_v, scale, None,
    )  # fmt: skip
    out, lse = op(*arguments[:count])[:2]
    return out[0, :, :heads].contiguous(), lse[0, :heads].t().contiguous()
