"""TokenLogprobsFunction: the kernel's own tensors forward, gradients onto the master."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.embedding import embedding
from consistent_kernels.linear import linear, prepare_weight
from consistent_kernels.linear.spec import choose
from consistent_kernels.testing import assert_bitwise_equal
from consistent_kernels.token_logprobs import token_logprobs, token_logprobs_from_logits
from train_bridge.functions.embedding import EmbeddingFunction
from train_bridge.functions.token_logprobs import TokenLogprobsFunction

VOCAB, SIZE, ROWS = 1100, 64, 33


def model_parts(master_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, SIZE, generator=generator).bfloat16().requires_grad_()
    master = (torch.randn(VOCAB, SIZE, generator=generator) / 4).to(master_dtype).requires_grad_()
    ids = torch.randint(VOCAB, (ROWS,), generator=generator)
    return hidden, master, ids


@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("linear_impl", ["reference", choose("cpu")])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_token_logprobs_train_equals_infer(
    master_dtype: torch.dtype, linear_impl: str, with_entropy: bool
) -> None:
    hidden, master, ids = model_parts(master_dtype)
    prepared = prepare_weight(
        master, dtype=torch.bfloat16, impl=linear_impl, out_dtype=torch.float32
    )
    result = TokenLogprobsFunction.apply(
        hidden, master, prepared, ids, 0.7, 1050, None, with_entropy, "reference", linear_impl
    )
    options = {"temperature": 0.7, "valid_vocab": 1050, "impl": "reference"}
    ids_of_engine = ids.to(torch.int32)
    with torch.no_grad():
        logits = linear(hidden, prepared, impl=linear_impl, out_dtype=torch.float32)
        engine = token_logprobs_from_logits(logits, ids_of_engine, entropy=False, **options)
        scored = token_logprobs(hidden, prepared, ids, linear_impl=linear_impl, **options)
    assert_bitwise_equal(result[0].detach(), engine.logprob)
    assert_bitwise_equal(result[1].detach(), engine.logsumexp)
    assert (result[2] is not None) == with_entropy
    if with_entropy:
        assert_bitwise_equal(result[2].detach(), scored.entropy)
    result[0][ids < 1050].sum().backward()
    assert hidden.grad.dtype == torch.bfloat16
    assert master.grad.dtype == master_dtype
    assert bool(master.grad.isfinite().all())
    assert bool((master.grad[:1050] != 0).any())
    assert bool((master.grad[1050:] == 0).all())


def test_token_logprobs_of_tied_embeddings_add_up() -> None:
    _, master, ids = model_parts(torch.float32)
    prepared = prepare_weight(master, dtype=torch.bfloat16, impl="reference")
    tokens = torch.arange(ROWS)
    embedded = EmbeddingFunction.apply(tokens, master, torch.bfloat16, "reference")
    assert_bitwise_equal(
        embedded.detach(), embedding(tokens, master.detach(), impl="reference").bfloat16()
    )
    args = (ids, 1.0, None, None, False, "reference", None)
    logprob, _, _ = TokenLogprobsFunction.apply(embedded, master, prepared, *args)
    logprob.sum().backward()
    total = master.grad.clone()

    leaf = embedded.detach().requires_grad_()
    head = master.detach().clone().requires_grad_()
    logprob, _, _ = TokenLogprobsFunction.apply(leaf, head, prepared, *args)
    logprob.sum().backward()
    expected = head.grad.clone()
    expected[:ROWS] += leaf.grad.float()
    assert_bitwise_equal(total, expected)
    assert bool((leaf.grad != 0).any())


def test_token_logprobs_grad_matches_autograd() -> None:
    hidden, master, ids = model_parts(torch.float32)
    prepared = prepare_weight(master, dtype=torch.bfloat16, impl="reference")
    generator = torch.Generator().manual_seed(2)
    advantage = torch.randn(ROWS, generator=generator)
    logprob, _, entropy = TokenLogprobsFunction.apply(
        hidden, master, prepared, ids, 0.7, None, None, True, "reference", None
    )
    (logprob * advantage - 0.01 * entropy).sum().backward()

    h64, w64 = hidden.detach().double().requires_grad_(), prepared.double().requires_grad_()
    log_p = (h64 @ w64.t() / 0.7).log_softmax(-1)
    chosen = log_p.gather(1, ids[:, None])[:, 0]
    uncertainty = -(log_p.exp() * log_p).sum(-1)
    (chosen * advantage.double() - 0.01 * uncertainty).sum().backward()
    # grad_hidden is rounded once to bf16 (2^-8 of itself); logits of magnitude 30 carry 64 * 2^-24
    # of 30 * 64, which p and with it every gradient inherits: below 2^-13 of the largest.
    difference = (hidden.grad.double() - h64.grad).abs()
    assert bool((difference <= 2**-8 * h64.grad.abs() + 2**-13 * h64.grad.abs().max()).all())
    difference = (master.grad.double() - w64.grad).abs()
    assert bool((difference <= 2**-13 * w64.grad.abs().max()).all())
