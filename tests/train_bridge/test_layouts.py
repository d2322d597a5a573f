"""The bits of a log-prob depend on its sequence alone: R8 of the relations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import token_logprobs
from train_bridge.logprobs import TokenScores

TEMPERATURE = 0.7


def flat(scores: TokenScores) -> torch.Tensor:
    """[2, N]: log-probs and entropies of all scored tokens in order."""
    return torch.stack((scores.log_probs[scores.mask], scores.entropy[scores.mask]))


@torch.no_grad()
def score(model: torch.nn.Module, *inputs: torch.Tensor, **options: object) -> torch.Tensor:
    return flat(token_logprobs(model, *inputs, temperature=TEMPERATURE, **options))


@pytest.fixture
def one_by_one(make_bridged: Callable, make_sequences: Callable) -> Callable[..., torch.Tensor]:
    """Return a function (family, device) -> scores of each sequence in a forward of its own."""

    def run(family: str, device: str) -> torch.Tensor:
        model = make_bridged(family, device=device)
        tokens = make_sequences(family, device).tokens
        return torch.cat([score(model, alone[None]) for alone in tokens if len(alone) > 1], dim=1)

    return run


def test_model_packing_equals_padding_equals_one_by_one(
    family: str,
    device: str,
    make_bridged: Callable,
    make_sequences: Callable,
    one_by_one: Callable,
) -> None:
    model, sequences = make_bridged(family, device=device), make_sequences(family, device)
    expected = one_by_one(family, device)
    ids, positions = sequences.packed()
    assert_bitwise_equal(score(model, ids, None, positions), expected, "packed")
    for side in ("left", "right"):
        for fill in (0, 1279):
            ids, mask = sequences.padded(side, fill)
            assert_bitwise_equal(score(model, ids, mask), expected, f"{side} padding of {fill}")
    # Peaked on the sampled tokens, or equal bits would show little.
    assert expected[0].max() > -0.5


@pytest.mark.parametrize("size", [1, 2, 8])
def test_model_is_micro_batch_invariant(
    family: str,
    device: str,
    size: int,
    make_bridged: Callable,
    make_sequences: Callable,
    one_by_one: Callable,
) -> None:
    model, sequences = make_bridged(family, device=device), make_sequences(family, device)
    expected = one_by_one(family, device)
    padded = sequences.padded("right")
    assert_bitwise_equal(score(model, *padded, micro_batch_size=size), expected)
    assert_bitwise_equal(score(model, *padded, micro_batch_tokens=size * 20), expected)


def test_model_is_order_and_selection_invariant(
    family: str, device: str, make_bridged: Callable, make_sequences: Callable
) -> None:
    model, sequences = make_bridged(family, device=device), make_sequences(family, device)
    ids, mask = sequences.padded("right")
    with torch.no_grad():
        scores = token_logprobs(model, ids, mask, temperature=TEMPERATURE)
        flipped = token_logprobs(model, ids.flip(0), mask.flip(0), temperature=TEMPERATURE)
    assert_bitwise_equal(flipped.log_probs.flip(0), scores.log_probs)
    response = scores.mask & (torch.arange(ids.shape[1], device=device) % 3 == 1)
    with torch.no_grad():
        some = token_logprobs(model, ids, mask, temperature=TEMPERATURE, response_mask=response)
    assert torch.equal(some.mask, response)
    assert_bitwise_equal(some.log_probs, torch.where(response, scores.log_probs, 0.0))
    assert_bitwise_equal(some.entropy, torch.where(response, scores.entropy, 0.0))


def test_model_forward_equals_scoring_under_every_mode(
    family: str,
    device: str,
    make_bridged: Callable,
    make_sequences: Callable,
    one_by_one: Callable,
) -> None:
    expected = one_by_one(family, device)
    batch = make_sequences(family, device).padded("left")
    model = make_bridged(family, device=device)

    def trained(**options: object) -> torch.Tensor:
        return flat(token_logprobs(model, *batch, temperature=TEMPERATURE, **options)).detach()

    assert_bitwise_equal(trained(), expected, "gradients on")
    model.train()
    assert_bitwise_equal(trained(), expected, "training mode")
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_bitwise_equal(trained(), expected, f"recompute, use_reentrant={reentrant}")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=dtype):
            assert_bitwise_equal(trained(), expected, f"autocast {dtype}")
            assert_bitwise_equal(score(model, *batch), expected, f"autocast {dtype}, no grad")
    with torch.inference_mode():
        assert_bitwise_equal(trained(), expected, "inference mode")
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert_bitwise_equal(trained(), expected, f"{dtype} as default")
        finally:
            torch.set_default_dtype(torch.float32)
    assert_bitwise_equal(trained(), expected, "after inference mode")


def test_model_fp32_masters_equal_bf16_masters(
    family: str, device: str, make_stock: Callable, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences(family, device).padded("right")
    masters = make_bridged(family, torch.float32, device)
    assert any(not torch.equal(p, p.bfloat16().float()) for p in masters.parameters()), (
        "these masters hold bf16 values: rounding them shows nothing"
    )
    rounded = make_bridged(family, torch.bfloat16, device)
    assert_bitwise_equal(score(masters, *batch), score(rounded, *batch))


def test_model_temperature_by_row_equals_one_number(
    device: str, make_bridged: Callable, make_sequences: Callable
) -> None:
    model, sequences = make_bridged("llama", device=device), make_sequences("llama", device)
    ids, mask = sequences.padded("left")
    heat = torch.tensor([0.6, 1.0, 1.3, 0.7, 0.0, 1.0, 0.7], device=device)
    with torch.no_grad():
        mixed = token_logprobs(model, ids, mask, temperature=heat)
        for row, value in enumerate(heat.tolist()):
            alone = token_logprobs(
                model, ids[row : row + 1], mask[row : row + 1], temperature=value
            )
            assert_bitwise_equal(alone.log_probs[0], mixed.log_probs[row], f"T={value}")
        greedy = token_logprobs(model, ids, mask, temperature=0.0)
        assert_bitwise_equal(greedy.log_probs, token_logprobs(model, ids, mask).log_probs)


def test_model_logits_and_fused_interface_equal_token_logprobs(
    family: str, device: str, make_bridged: Callable, make_sequences: Callable
) -> None:
    from consistent_kernels.token_logprobs import token_logprobs_from_logits

    model, sequences = make_bridged(family, device=device), make_sequences(family, device)
    ids, mask = sequences.padded("left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        scores = token_logprobs(model, ids, mask, temperature=TEMPERATURE)
        logits = model(ids, mask, position_ids=positions, use_cache=False).logits
        kept = model(ids, mask, logits_to_keep=5).logits
        fused = model(ids, mask, temperature=TEMPERATURE)
        rolled = ids.roll(-1, dims=1)
        labelled = model(ids, mask, temperature=TEMPERATURE, shift_labels=rolled)
    assert logits.dtype == torch.float32
    assert logits.shape == (*ids.shape, model.config.vocab_size)
    assert_bitwise_equal(kept, logits[:, -5:].contiguous())
    assert not logits[mask == 0].any()
    expected = scores.log_probs[scores.mask]
    predicts = scores.mask.roll(-1, dims=1)
    assert_bitwise_equal(fused.log_probs[predicts], expected, "next token")
    assert_bitwise_equal(fused.entropy[predicts], scores.entropy[scores.mask], "entropy")
    assert_bitwise_equal(labelled.log_probs[predicts], expected, "shift_labels")
    from_logits = token_logprobs_from_logits(
        logits[predicts],
        ids[scores.mask],
        temperature=TEMPERATURE,
        impl=model._bridge.impl("token_logprobs"),
    )
    assert_bitwise_equal(from_logits.logprob, expected, "from logits")


def test_model_varlen_and_checkpoint_utility_equal_packed(
    device: str, make_bridged: Callable, make_sequences: Callable
) -> None:
    from torch.utils.checkpoint import checkpoint

    model, sequences = make_bridged("qwen3", device=device), make_sequences("qwen3", device)
    ids, positions = sequences.packed()
    edges = torch.tensor([0, *[len(tokens) for tokens in sequences.tokens]]).cumsum(0)
    plain = model(ids, position_ids=positions, temperature=1.0).log_probs
    varlen = model(ids, cu_seq_lens_q=edges.int().to(device), temperature=1.0).log_probs
    outside = checkpoint(
        lambda: model(ids, position_ids=positions, temperature=1.0).log_probs, use_reentrant=False
    )
    assert_bitwise_equal(varlen, plain)
    assert_bitwise_equal(outside, plain)
    hidden = model.model(ids, position_ids=positions).last_hidden_state
    assert hidden.dtype == torch.bfloat16
    assert hidden.shape == (*ids.shape, model.config.hidden_size)


def test_model_is_run_to_run_stable(
    device: str, make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences("qwen2", device).padded("right")
    results = []
    for _ in range(2):
        model = make_bridged("qwen2", torch.float32, device)
        scores = token_logprobs(model, *batch)
        scores.log_probs.sum().backward()
        results.append((flat(scores).detach(), [p.grad for p in model.parameters()]))
    assert_bitwise_equal(results[0][0], results[1][0])
    for first, second in zip(results[0][1], results[1][1], strict=True):
        assert_bitwise_equal(first, second, "gradient")


def test_model_control_stock_differs_from_bridged(
    family: str, make_stock: Callable, make_bridged: Callable, make_sequences: Callable
) -> None:
    ids, mask = make_sequences(family).padded("left")
    with torch.no_grad():
        logits = make_stock(family)(
            ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits
        ours = token_logprobs(make_bridged(family), ids, mask)
    stock = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    a, b = stock[ours.mask[:, 1:]], ours.log_probs[ours.mask]
    assert (a != b).float().mean() > 0.9
    # The same model all the same: bf16 roundings move a log-prob by tenths at most.
    assert (a - b).abs().mean() < 0.5


def test_model_control_truncated_masters_diverge(
    make_bridged: Callable, make_sequences: Callable
) -> None:
    batch = make_sequences("llama").padded("left")
    model = make_bridged("llama", torch.float32)
    expected = score(model, *batch)
    name = "model.layers.0.mlp.down_proj"
    master = model.get_submodule(name).weight.detach()
    truncated = (master.view(torch.int32) & -65536).view(torch.float32)
    model._bridge.prepared[name].weight.copy_(truncated)
    assert not torch.equal(score(model, *batch), expected)
