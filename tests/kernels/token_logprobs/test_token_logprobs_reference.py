"""The CPU program's partial results: what a vocabulary-parallel side would exchange."""

from __future__ import annotations

import torch

from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, peaked_logits
from consistent_kernels.token_logprobs.reference import _tile_partials, merge_tiles


def test_token_logprobs_partials_are_split_invariant() -> None:
    logits = peaked_logits(17, 6000, seed=1)
    whole = _tile_partials(logits, True)
    for cuts in ((1024,), (2048, 4096), (1024, 5120)):
        shards = [_tile_partials(shard, True) for shard in logits.tensor_split(cuts, dim=1)]
        merged = [torch.cat(column, dim=1) for column in zip(*shards, strict=True)]
        for part, expected in zip(merged, whole, strict=True):
            assert_bitwise_equal(part, expected)
        for part, expected in zip(merge_tiles(*merged), merge_tiles(*whole), strict=True):
            assert_bitwise_equal(part, expected)


def test_control_unaligned_shards_differ() -> None:
    # Flat logits: one dominant token would hide the order of the other additions.
    logits = torch.randn(64, 6000, generator=torch.Generator().manual_seed(2))
    whole, _ = merge_tiles(*_tile_partials(logits, False))
    shards = [_tile_partials(shard, False) for shard in logits.tensor_split((1000, 3333), dim=1)]
    m, s, _ = zip(*shards, strict=True)
    unaligned, _ = merge_tiles(torch.cat(m, dim=1), torch.cat(s, dim=1), None)
    assert not bitwise_equal(unaligned, whole)
