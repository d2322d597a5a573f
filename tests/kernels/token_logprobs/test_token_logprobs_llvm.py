"""The compiled CPU program: partial results that a sampler has already, tiles read in place."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels import llvm

if not llvm.is_available():
    pytest.skip("needs an x86-64 CPU with AVX2, and llvmlite", allow_module_level=True)

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, peaked_logits
from consistent_kernels.token_logprobs import count_at_least, draw_llvm, token_logprobs_from_logits
from consistent_kernels.token_logprobs import llvm as compiled
from consistent_kernels.token_logprobs.reference import merge_tiles

VOCABS = (1, 1000, 1024, 1025, 5000)


def rows_of(vocab: int) -> torch.Tensor:
    logits = peaked_logits(5, vocab, seed=1)
    logits[1, ::2] = -float("inf")
    logits[2] = -float("inf")
    logits[3, vocab // 2] = float("nan")
    logits[4, -1] = float("inf")
    return logits


@pytest.mark.parametrize("vocab", VOCABS)
def test_given_partials_give_the_same_bits(vocab: int) -> None:
    logits, ids = rows_of(vocab), torch.arange(5) % vocab
    by = torch.tensor([1.0, 0.7, 1.0, 1.3, 1.0])
    options = {"temperature": by, "entropy": False, "impl": "llvm"}
    partials = compiled.tile_partials(logits, by, vocab)
    expected = token_logprobs_from_logits(logits, ids, **options)
    given = token_logprobs_from_logits(logits, ids, partials=partials, **options)
    assert_bitwise_equal(given.logprob, expected.logprob)
    assert_bitwise_equal(given.logsumexp, expected.logsumexp)


def test_control_partials_of_another_temperature_differ() -> None:
    logits, ids = peaked_logits(5, 5000, seed=1), torch.arange(5)
    options = {"temperature": 1.0, "entropy": False, "impl": "llvm"}
    partials = compiled.tile_partials(logits, torch.full((5,), 0.7), 5000)
    given = token_logprobs_from_logits(logits, ids, partials=partials, **options)
    expected = token_logprobs_from_logits(logits, ids, **options)
    assert not bitwise_equal(given.logprob, expected.logprob)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_tile_read_in_place_equals_a_copied_one(vocab: int, entropy: bool) -> None:
    # A mask that bans nothing makes every tile pass through the copy.
    logits, by = rows_of(vocab), torch.ones(5)
    nothing = torch.zeros(vocab, dtype=torch.bool)
    results = 3 if entropy else 2
    in_place = compiled.tile_partials(logits, by, vocab, entropy=entropy)[..., :results]
    copied = compiled.tile_partials(logits, by, vocab, nothing, entropy=entropy)[..., :results]
    assert_bitwise_equal(in_place.contiguous(), copied.contiguous())


def test_tiles_are_merged_as_the_reference_merges_them() -> None:
    parts = compiled.tile_partials(
        peaked_logits(7, 49152, seed=2), torch.ones(7), 49152, entropy=True
    )
    m, s, w = parts.unbind(2)
    ours = merge_tiles(m, s, w, compiled._ascending_sums)
    for mine, theirs in zip(ours, merge_tiles(m, s, w), strict=True):
        assert_bitwise_equal(mine, theirs)
    terms = torch.randn(7, 48, generator=torch.Generator().manual_seed(4))
    descending = compiled._ascending_sums(terms.flip(1))
    assert not bitwise_equal(descending, compiled._ascending_sums(terms)), "control: order shows"


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_drawn_token_is_scored_with_the_same_bits(vocab: int) -> None:
    logits = rows_of(vocab)
    by = torch.tensor([1.0, 0.7, 1.0, 1.3, 1.0])
    uniform = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.999], dtype=torch.float64)
    drawn = draw_llvm.draw_and_score(logits, by, uniform)
    alone = draw_llvm.draw(logits, by, compiled.tile_partials(logits, by, vocab), uniform)
    assert torch.equal(drawn.ids, alone)
    options = {"temperature": by, "entropy": False, "impl": "llvm"}
    scored = token_logprobs_from_logits(logits, drawn.ids, **options)
    assert_bitwise_equal(drawn.logprob, scored.logprob)
    assert torch.equal(drawn.rank, count_at_least(logits, drawn.ids))
    if vocab > 1:
        other = token_logprobs_from_logits(logits, (drawn.ids + 1) % vocab, **options)
        assert not bitwise_equal(drawn.logprob[:1], other.logprob[:1]), "control"


def test_rejects_partials_that_do_not_fit() -> None:
    logits, ids = peaked_logits(2, 3000, seed=3), torch.zeros(2, dtype=torch.int64)
    partials = compiled.tile_partials(logits, torch.ones(2), 3000)
    options = {"temperature": 1.0, "impl": "llvm"}
    with pytest.raises(InvalidInputError, match="partials must be of shape"):
        token_logprobs_from_logits(logits, ids, partials=partials, entropy=True, **options)
    with pytest.raises(InvalidInputError, match=r"partials must be of shape \(2, 3, 3\)"):
        token_logprobs_from_logits(logits, ids, partials=partials[:1], entropy=False, **options)
