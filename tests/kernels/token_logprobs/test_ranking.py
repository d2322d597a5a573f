"""The k likeliest tokens and ranks: ties, masks, and log-probs with the op's bits."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.testing import BATCH_SIZES, assert_bitwise_equal, peaked_logits
from consistent_kernels.token_logprobs import (
    count_at_least,
    token_logprobs_from_logits,
    token_ranks,
    topk_ids,
    topk_logprobs,
)


def tied_logits(rows: int, vocab: int, *, seed: int, device: str) -> torch.Tensor:
    """Few distinct values, of both signs, with -0.0 and 0.0 and masked ids."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-3.5, -1.0, -0.0, 0.0, 1.0, 2.5, -float("inf")])
    return values[torch.randint(7, (rows, vocab), generator=generator)].to(device)


@pytest.mark.parametrize("k", [1, 5, 700])
def test_topk_ids_lower_id_wins(impl_device: tuple[str, str], k: int) -> None:
    _, device = impl_device
    logits = tied_logits(9, 700, seed=1, device=device)
    ids = topk_ids(logits, k)
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        expected = sorted(range(700), key=lambda i: (-row[i], i))[:k]
        assert chosen == expected


def test_topk_logprobs_train_equals_infer(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(130, 3000, seed=2, device=device)
    banned = torch.tensor([1, 2], device=device)
    options = {"temperature": 0.7, "valid_vocab": 2500, "banned": banned, "impl": impl}
    top = topk_logprobs(logits, 5, **options)
    assert top.ids.shape == top.logprob.shape == (130, 5)
    assert int(top.ids.max()) < 2500
    assert not bool(torch.isin(top.ids, banned).any())
    assert bool((top.logprob.diff(dim=1) <= 0).all())
    for column in range(5):
        one = token_logprobs_from_logits(logits, top.ids[:, column], **options)
        assert_bitwise_equal(top.logprob[:, column].contiguous(), one.logprob)


def test_topk_ids_is_batch_invariant(impl_device: tuple[str, str]) -> None:
    _, device = impl_device
    logits = tied_logits(257, 90, seed=3, device=device)
    whole, chosen = topk_ids(logits, 4), torch.arange(257, device=device) % 90
    ranks = token_ranks(logits, chosen)
    for rows in BATCH_SIZES:
        part = slice(257 - rows, 257)
        assert torch.equal(topk_ids(logits[part], 4), whole[part])
        assert torch.equal(token_ranks(logits[part], chosen[part]), ranks[part])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_ranks_count_strictly_greater(
    impl_device: tuple[str, str], temperature: float
) -> None:
    _, device = impl_device
    logits = tied_logits(9, 700, seed=4, device=device)
    ids = torch.arange(9, device=device) * 7
    ranks = token_ranks(logits, ids, temperature=temperature, valid_vocab=600)
    for row, token, rank in zip(logits.tolist(), ids.tolist(), ranks.tolist(), strict=True):
        assert rank == 1 + sum(value > row[token] for value in row[:600])
    top = topk_ids(logits, 1, temperature=temperature)
    assert bool((token_ranks(logits, top[:, 0], temperature=temperature) == 1).all())


def test_control_stock_topk_breaks_ties_otherwise() -> None:
    logits = torch.zeros(1, 5000)
    assert torch.topk(logits, 5).indices.tolist() != [[0, 1, 2, 3, 4]]
    assert topk_ids(logits, 5).tolist() == [[0, 1, 2, 3, 4]]


def test_ranking_rejects_bad_inputs() -> None:
    logits = torch.zeros(2, 8)
    with pytest.raises(InvalidInputError, match="k must be between 1 and 8, got 9"):
        topk_ids(logits, 9)
    with pytest.raises(InvalidInputError, match="logits must be float32"):
        topk_logprobs(logits.half(), 2, temperature=1.0, impl="reference")
    with pytest.raises(InvalidInputError, match=r"ids must be of shape \(2,\), got \(2, 1\)"):
        token_ranks(logits, torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("vocab", [700, 8192, 20_000])
def test_count_at_least_counts(impl_device: tuple[str, str], vocab: int) -> None:
    _, device = impl_device
    logits = tied_logits(9, vocab, seed=5, device=device)
    logits[2, 5] = float("nan")  # counts for nobody
    ids = torch.arange(9, device=device) * 7
    found = count_at_least(logits, ids)
    for row, token, count in zip(logits.tolist(), ids.tolist(), found.tolist(), strict=True):
        assert count == sum(value >= row[token] for value in row)
    assert torch.equal(count_at_least(logits[3:4], ids[3:4]), found[3:4])


def test_count_at_least_rejects_bad_input() -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(InvalidInputError, match="ids must be int64 of 1 dimension"):
        count_at_least(logits, torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(InvalidInputError, match="logits must be float32"):
        count_at_least(logits.bfloat16(), torch.zeros(2, dtype=torch.int64))
