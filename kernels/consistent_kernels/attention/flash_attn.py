"""Attention through FlashAttention 3 out of vLLM's wheel, one key split a call, merged in order.

FA3 with `num_splits=1` adds keys in ascending tiles, so a row's bits follow its query and keys, as
long as every phase runs tiles of one width. Four things choose another width, and all are pinned:

- the mask. A causal one is consistent at head dim 128 alone; elsewhere its tiles follow the number
  of queries, or differ between pages and packed keys. A window's tiles never do: one that hides the
  future alone serves the other head dims, one that hides nothing the queries behind a split;
- `max_seqlen_q == 1`, which drops the causal mask: decode says 2;
- the number of queries times heads of a group, where a head dim has a tile for at most 64 of them
  (64 and 128): 128 has equal key tiles in both; `FLASH_ONE_GROUP_HEAD_DIMS` always say two queries.
  Rows and grid come from the sequences' own lengths, so that number decides nothing else;
- pages of a multiple of the tile, which TMA loads (and with them what lies behind the last key):
  pages hold 16, 32 or 64 keys.

Contexts of up to `key_split` keys are one call. Longer ones are cut at multiples of it, counted
from position 0: decode runs all splits of all requests as sequences of one call; so does prefill
for the queries inside a split, with one more call a split for those behind it.
`flash_attn_splits.py` cuts, `flash_attn_merge.py` merges.

Source: vllm/vllm_flash_attn/flash_attn_interface.py (0.25.1); tiles: vllm-project/flash-attention,
hopper/{heuristics.h, tile_size.h, tile_scheduler.hpp}; Shah et al., arXiv 2407.08608.
"""

from __future__ import annotations

import dataclasses

import torch

from consistent_kernels import vendored
from consistent_kernels.attention.flash_attn_merge import merge_decode, merge_prefill
from consistent_kernels.attention.flash_attn_splits import decode_splits, prefill_splits
from consistent_kernels.attention.parameters import AttentionParameters
from consistent_kernels.attention.spec import (
    FLASH_CAUSAL_HEAD_DIMS,
    FLASH_HEAD_DIMS,
    FLASH_ONE_GROUP_HEAD_DIMS,
    FLASH_PAGE_SIZES,
)
from consistent_kernels.errors import UnsupportedError

_BEYOND = 1 << 20
"""A window that hides nothing must stay below the largest length, or FA3 drops it."""

_ONE_GROUP_ROWS = 64
"""Queries times heads of a group up to which FA3 takes one warp group (`use_one_mma_wg`)."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """Keys and values of all requests, packed or in pages.

    Attributes:
        k, v: [Tk, Hk, D], or pages [blocks, block_size, Hk, D].
        lens: [B] int32 keys of each request.
        starts: [B + 1] int32 row borders (packed).
        table: [B, blocks] int32 (pages).
    """

    k: torch.Tensor
    v: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor | None = None
    table: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Told:
    """What FA3 is told beside the tensors; with head dim and pages it decides the tile of a call.

    Attributes:
        causal: whether the mask is the causal one.
        left, right: window, -1 for none.
        max_q: `max_seqlen_q`.
    """

    causal: bool
    left: int
    right: int
    max_q: int


def told(params: AttentionParameters, max_q: int, *, sees_all: bool) -> Told:
    """Return what FA3 is told of at most `max_q` queries a sequence.

    Args:
        sees_all: the queries see all keys; else the last query is the last key's position.
    """
    if params.head_dim in FLASH_ONE_GROUP_HEAD_DIMS and 2 * params.group <= _ONE_GROUP_ROWS:
        return Told(causal=not sees_all, left=-1, right=-1 if sees_all else 0, max_q=2)
    causal = not sees_all and params.head_dim in FLASH_CAUSAL_HEAD_DIMS
    left = -1 if causal else _BEYOND
    if sees_all:
        # A window of max_seqlen_q - 1 or more to the right counts as none.
        return Told(causal, left, right=max_q + 1, max_q=max_q + 3)
    return Told(causal, left, right=0, max_q=max(max_q, 2))


def _forward(
    q: torch.Tensor,
    keys: Keys,
    params: AttentionParameters,
    cu_q: torch.Tensor,
    max_q: int,
    *,
    used_q: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    sees_all: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run FA3 with one split; returns (out [T, Hq, D], lse [Hq, T] fp32).

    Args:
        cu_q: [B + 1] int32 first rows; with used_q [B] the number of rows of each, so that they may
            leave gaps.
        max_q: upper bound of rows of a sequence.
        sees_all: the queries see all keys; else the last query is the last key's position.
    """
    say = told(params, max_q, sees_all=sees_all)
    packed = keys.table is None
    result = vendored.flash_attn_3().fwd(
        q, keys.k, keys.v, None, None, None, out,
        cu_q, keys.starts if packed else None, None, used_q, keys.lens,
        say.max_q, 2 * _BEYOND, keys.table, None, None,
        None, None, None, None, None, None,
        params.scale, say.causal, say.left, say.right, 0.0, True, None, 1, None, 0, None,
        1, 0, None,
    )  # fmt: skip
    return result[0], result[1]


def _check(params: AttentionParameters) -> None:
    if params.head_dim not in FLASH_HEAD_DIMS:
        raise UnsupportedError(
            "attention", f"head_dim {params.head_dim} with impl 'flash_attn'", FLASH_HEAD_DIMS
        )
    if params.sliding_window is not None:
        raise UnsupportedError(
            "attention", "a sliding window with impl 'flash_attn'", ["impl 'triton'"]
        )


def _attend(
    q: torch.Tensor,
    keys: Keys,
    cu_q: torch.Tensor,
    params: AttentionParameters,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(params)
    if q.shape[0] == 0:
        return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    splits = -(-max_seq_len // params.key_split)
    if splits <= 1:
        result, lse = _forward(q, keys, params, cu_q, max_query_len, out=out)
    elif max_query_len == 1:
        result, lse = _decode(q, keys, cu_q, params, splits, out)
    else:
        result, lse = _prefill(q, keys, cu_q, params, max_query_len, splits, out)
    return result, lse.t()


def _decode(
    q: torch.Tensor,
    keys: Keys,
    cu_q: torch.Tensor,
    params: AttentionParameters,
    splits: int,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """At most one query a request: every (request, split) is a sequence of one call."""
    parts = decode_splits(q, keys.lens, keys.starts, keys.table, cu_q, splits, params, keys.k)
    split_keys = Keys(keys.k, keys.v, parts.lens, parts.starts, parts.table)
    partial, lse = _forward(parts.q, split_keys, params, parts.rows, 1, used_q=parts.used_q)
    return merge_decode(q, partial, lse, keys.lens, cu_q, splits, params, out)


def _prefill(
    q: torch.Tensor,
    keys: Keys,
    cu_q: torch.Tensor,
    params: AttentionParameters,
    max_query_len: int,
    splits: int,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Any number of queries: one call for those inside a split, one a split for those behind it."""
    tokens, heads, _ = q.shape
    before = splits - 1
    partial = q.new_empty((before, *q.shape))
    lse = q.new_empty((before, heads, tokens), dtype=torch.float32)
    parts = prefill_splits(keys.lens, keys.starts, keys.table, cu_q, splits, params, keys.k)
    inside = Keys(keys.k, keys.v, parts.lens, parts.starts, parts.table)
    most = min(max_query_len, params.key_split)
    own = _forward(q, inside, params, parts.rows, most, used_q=parts.used_q)
    for split in range(before):
        table = None
        if keys.table is not None:
            table = keys.table[:, split * params.key_split // keys.k.shape[1] :]
        starts = None if parts.behind_starts is None else parts.behind_starts[split]
        _, found = _forward(
            q,
            Keys(keys.k, keys.v, parts.behind_lens[split], starts, table),
            params,
            parts.behind_rows[split],
            max_query_len,
            used_q=parts.behind_used_q[split],
            out=partial[split],
            sees_all=True,
        )
        lse[split].copy_(found)
    return merge_prefill(q, own, partial, lse, keys.lens, cu_q, params, out)


def attention_varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    params: AttentionParameters,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch over packed keys; shapes as in `api.attention_varlen`.

    Args:
        max_seq_len: an upper bound of the keys of a sequence.
    """
    starts = cu_seqlens_k.to(torch.int32)
    keys = Keys(k, v, starts[1:] - starts[:-1], starts)
    cu_q = cu_seqlens_q.to(torch.int32)
    return _attend(q, keys, cu_q, params, min(max_seq_len, q.shape[0]), max_seq_len, None)


def attention_paged_fwd(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    params: AttentionParameters,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch over pages; shapes as in `api.attention_paged`.

    Args:
        out: [T, Hq, D] to write into, or None.

    Raises:
        UnsupportedError: pages of another size than 16, 32 or 64 keys.
    """
    if k_cache.shape[1] not in FLASH_PAGE_SIZES or params.key_split % k_cache.shape[1]:
        raise UnsupportedError(
            "attention_paged", f"pages of {k_cache.shape[1]} with 'flash_attn'", FLASH_PAGE_SIZES
        )
    keys = Keys(
        k_cache, v_cache, seq_lens.to(torch.int32), table=block_table.to(torch.int32).contiguous()
    )
    cu_q = cu_seqlens_q.to(torch.int32)
    return _attend(q, keys, cu_q, params, max_query_len, max_seq_len, out)
