"""What token_logprobs scores, masks and refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consistent_kernels.errors import ConfigurationError, ConsistencyError, InvalidInputError
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import compare_logprobs, token_logprobs

IDS = torch.tensor([[5, 9, 11, 6, 8], [7, 5, 9, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def test_scores_are_log_softmax_of_the_logits(family: str, make_bridged: Callable) -> None:
    model = make_bridged(family)
    with torch.no_grad():
        scores = token_logprobs(model, IDS, MASK, temperature=0.8)
        logits = model(IDS, MASK).logits
    table = (logits.double() / 0.8).log_softmax(-1)
    expected = table[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1)
    entropy = -(table.exp() * table).sum(-1)[:, :-1]
    assert torch.equal(scores.mask, MASK.bool() & (torch.arange(5) > 0))
    keep = scores.mask[:, 1:]
    # fp32: |z| <= 60, a few roundings of z - max and of the sum of 1280 terms; 2^-23 * 60 * 4.
    assert (scores.log_probs[:, 1:] - expected)[keep].abs().max() < 3e-5
    assert (scores.entropy[:, 1:] - entropy)[keep].abs().max() < 3e-4
    assert not scores.log_probs[~scores.mask].any()
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32


def test_entropy_is_optional_and_moves_no_bit(make_bridged: Callable) -> None:
    model = make_bridged("llama")
    scores = token_logprobs(model, IDS, MASK)
    without = token_logprobs(model, IDS, MASK, entropy=False)
    assert without.entropy is None
    assert_bitwise_equal(without.log_probs, scores.log_probs)


def test_masked_vocabulary_is_impossible(make_bridged: Callable) -> None:
    model = make_bridged("qwen3")
    with torch.no_grad():
        plain = token_logprobs(model, IDS, MASK).log_probs
        cut = token_logprobs(model, IDS, MASK, valid_vocab=10).log_probs
        banned = token_logprobs(model, IDS, MASK, banned=torch.arange(10, 1280)).log_probs
    assert_bitwise_equal(banned, cut)
    assert cut[0, 2] == -torch.inf  # token 11
    finite = torch.isfinite(cut) & (cut != 0)
    assert (cut > plain)[finite].all()


def test_response_mask_saves_the_head(
    make_bridged: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_bridged("llama")
    head = type(model.lm_head)
    score, rows = head.forward, []

    def counted(self: torch.nn.Module, hidden: torch.Tensor, scoring: object) -> object:
        rows.append(scoring.rows.numel())
        return score(self, hidden, scoring)

    monkeypatch.setattr(head, "forward", counted)
    response = torch.zeros_like(IDS)
    response[0, 3:] = 1
    token_logprobs(model, IDS, MASK, response_mask=response, micro_batch_size=1)
    assert rows == [2]  # and no forward for the second sequence, of which nothing is asked


def test_nothing_to_score_gives_zeros(make_bridged: Callable) -> None:
    scores = token_logprobs(make_bridged("llama"), torch.tensor([[5], [6]]))
    assert not scores.log_probs.any()
    assert not scores.mask.any()


def test_compare_logprobs_takes_scores_as_they_are(make_bridged: Callable) -> None:
    model = make_bridged("llama")
    with torch.no_grad():
        first = token_logprobs(model, IDS, MASK)
        second = token_logprobs(model, IDS, MASK, micro_batch_size=1)
    report = compare_logprobs(first.log_probs, second.log_probs, first.mask)
    assert report.bitwise_equal
    assert report.num_tokens == 6
    nudged = first.log_probs.clone()
    nudged[1, 2] = nudged[1, 2].nextafter(torch.tensor(0.0))
    report = compare_logprobs(nudged, second.log_probs, first.mask)
    assert report.mismatched_tokens == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_parameters_are_named(value: float, make_bridged: Callable) -> None:
    model = make_bridged("qwen2")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.bias[2] = value
    with pytest.raises(
        InvalidInputError, match=r"NaN or infinity.*layers\.1\.self_attn\.v_proj\.bias"
    ):
        token_logprobs(model, IDS, MASK)


def test_token_logprobs_rejects_bad_masks_and_limits(
    make_bridged: Callable, make_stock: Callable
) -> None:
    model = make_bridged("llama")
    on_first, on_padding = torch.zeros_like(IDS), torch.zeros_like(IDS)
    on_first[0, 0], on_padding[1, 4] = 1, 1
    with pytest.raises(InvalidInputError, match="0 on the first token"):
        token_logprobs(model, IDS, MASK, response_mask=on_first)
    with pytest.raises(InvalidInputError, match="0 on padding"):
        token_logprobs(model, IDS, MASK, response_mask=on_padding)
    with pytest.raises(InvalidInputError, match="response_mask must be of shape"):
        token_logprobs(model, IDS, MASK, response_mask=on_first[:, 1:])
    with pytest.raises(InvalidInputError, match="response_mask must be bool, or 0 and 1, got"):
        token_logprobs(model, IDS, MASK, response_mask=torch.full(IDS.shape, torch.nan))
    with pytest.raises(InvalidInputError, match="micro_batch_size must be at least 1, got 0"):
        token_logprobs(model, IDS, MASK, micro_batch_size=0)
    with pytest.raises(InvalidInputError, match="temperature"):
        token_logprobs(model, IDS, MASK, temperature=-1.0)
    with pytest.raises(ConsistencyError, match="valid_vocab and banned leave no token"):
        token_logprobs(model, IDS, MASK, banned=torch.ones(1280, dtype=torch.bool))
    with pytest.raises(InvalidInputError, match="below 1280, got 1280 at row 1, column 1"):
        token_logprobs(model, torch.tensor([[1, 2], [3, 1280]]))
    with pytest.raises(InvalidInputError, match="max_position_embeddings"):
        token_logprobs(model, torch.ones(1, 2049, dtype=torch.long))
    with pytest.raises(ConfigurationError, match="not bridged"):
        token_logprobs(make_stock("llama"), IDS)
