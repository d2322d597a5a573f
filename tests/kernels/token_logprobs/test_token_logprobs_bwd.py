"""Gradients of token log-probs against fp64 autograd, each part alone, and row tile by row tile."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.linear import prepare_weight
from consistent_kernels.testing import assert_bitwise_equal, peaked_logits
from consistent_kernels.token_logprobs import (
    TokenLogprobs,
    token_logprobs,
    token_logprobs_bwd,
    token_logprobs_from_logits,
    token_logprobs_from_logits_bwd,
)

PARTS = ("logprob", "logsumexp", "entropy")


def scores_fp64(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, allowed: torch.Tensor
) -> TokenLogprobs:
    """Independent of the op: fp64, masked ids taken out of the vocabulary altogether."""
    z = (logits / temperature[:, None].double())[:, allowed]
    position = torch.full((logits.shape[1],), -1, device=logits.device)
    position[allowed] = torch.arange(len(allowed), device=logits.device)
    lse = z.logsumexp(-1)
    log_p = z - lse[:, None]
    return TokenLogprobs(log_p.gather(1, position[ids]), lse, -(log_p.exp() * log_p).sum(-1))


@pytest.mark.parametrize("parts", [("logprob",), ("logsumexp",), ("entropy",), PARTS])
def test_token_logprobs_from_logits_grad_matches_reference(
    impl_device: tuple[str, str], parts: tuple[str, ...]
) -> None:
    impl, device = impl_device
    vocab, valid = 3000, 2500
    generator = torch.Generator().manual_seed(1)
    logits = peaked_logits(9, vocab, seed=2, device=device)
    banned = torch.tensor([3, 1700], device=device)
    allowed = torch.ones(vocab, dtype=torch.bool, device=device)
    allowed[valid:] = False
    allowed[banned] = False
    ids = torch.randint(4, 1700, (9, 2), generator=generator).to(device)
    temperature = torch.tensor([1.0, 0.7, 1.3], device=device).repeat(3)
    options = {"temperature": temperature, "valid_vocab": valid, "banned": banned, "impl": impl}
    saved = token_logprobs_from_logits(logits, ids, **options)
    grads = {
        name: torch.randn(getattr(saved, name).shape, generator=generator).to(device)
        for name in parts
    }
    grad = TokenLogprobs(*(grads.get(name) for name in PARTS))
    actual = token_logprobs_from_logits_bwd(grad, logits, ids, saved, **options)

    exact = logits.double().requires_grad_()
    outputs = scores_fp64(exact, ids, temperature, allowed.nonzero()[:, 0])
    sum((getattr(outputs, name) * grads[name].double()).sum() for name in parts).backward()
    # p = exp(z - lse): the exponent carries 2^-24 of |z| + |lse| + |z - lse| <= 4 max |z|, so p is
    # off by that much relative, and so is each term of p times |log p + H| <= 2 max |z| + 20. The
    # rest is a few products and sums.
    z64 = logits.double() / temperature[:, None].double()
    z = z64[:, allowed].abs().amax(-1, keepdim=True)
    strength = sum(g.abs().reshape(9, -1).sum(-1, keepdim=True) for g in grads.values()).double()
    p = (z64 - outputs.logsumexp.detach()[:, None]).exp()
    terms = p * (2 * z + 20 if "entropy" in parts else 1)
    if "logprob" in parts:
        terms = terms.scatter(1, ids, 1.0)
    bound = 2**-24 * (4 * z + 30) * strength * terms / temperature[:, None].double() + 1e-38
    assert actual.dtype == torch.float32
    assert bool(((actual.double() - exact.grad).abs() <= bound).all())
    assert bool((actual[:, ~allowed] == 0).all())


def test_token_logprobs_grad_of_masked_logits_is_finite(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(3, 2000, seed=3, device=device)
    logits[:, 500:1700] = -float("inf")
    ids = torch.tensor([[1, 600], [2, 601], [3, 602]], device=device)
    saved = token_logprobs_from_logits(logits, ids, temperature=1.0, impl=impl)
    ones = TokenLogprobs(*(torch.ones_like(part) for part in saved))
    grad = token_logprobs_from_logits_bwd(ones, logits, ids, saved, temperature=1.0, impl=impl)
    assert bool(grad.isfinite().all())
    without = torch.cat([logits[:, :500], logits[:, 1700:]], dim=1)
    exact = token_logprobs_from_logits(without, ids[:, :1], temperature=1.0, impl=impl)
    assert bool((saved.entropy - exact.entropy).abs().max() < 1e-4)


def test_token_logprobs_masked_ids_are_constants(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits = peaked_logits(2, 2000, seed=6, device=device)
    ids = torch.tensor([[1, 5, 1999], [2, 5, 1998]], device=device)
    options = {
        "temperature": 0.7,
        "valid_vocab": 1998,
        "banned": torch.tensor([5], device=device),
        "impl": impl,
    }
    saved = token_logprobs_from_logits(logits, ids, **options)
    ones = TokenLogprobs(torch.ones_like(saved.logprob), None, None)
    grad = token_logprobs_from_logits_bwd(ones, logits, ids, saved, **options)
    one = TokenLogprobs(torch.ones(2, 1, device=device), None, None)
    alone = token_logprobs_from_logits_bwd(one, logits, ids[:, :1], saved, **options)
    assert_bitwise_equal(grad + 0.0, alone + 0.0)  # a masked column may hold -0.0
    assert bool((grad[:, [5, 1998, 1999]] == 0).all())


@pytest.mark.parametrize("rows", [1, 33, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_grad_matches_reference(
    impl_device: tuple[str, str], rows: int, dtype: torch.dtype
) -> None:
    impl, device = impl_device
    if impl == "llvm" and dtype != torch.bfloat16:
        pytest.skip("linear's own GEMM multiplies bf16 alone")
    vocab, size = 1100, 64
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(rows, size, generator=generator).to(device=device, dtype=dtype)
    master = (torch.randn(vocab, size, generator=generator) / 4).to(device)
    weight = prepare_weight(master, dtype=dtype, impl=impl)
    ids = torch.randint(vocab, (rows,), generator=generator).to(device)
    saved = token_logprobs(hidden, weight, ids, temperature=0.7, impl=impl)
    grad = TokenLogprobs(
        torch.randn(rows, generator=generator).to(device),
        None,
        torch.randn(rows, generator=generator).to(device),
    )
    options = {"temperature": 0.7, "impl": impl}
    grad_hidden, grad_weight = token_logprobs_bwd(grad, hidden, weight, ids, saved, **options)
    assert grad_hidden.dtype == dtype
    assert grad_weight.dtype == torch.float32

    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    everything = torch.arange(vocab, device=device)
    temperature = torch.full((rows,), 0.7, device=device)
    exact = scores_fp64(h64 @ w64.t(), ids[:, None], temperature, everything)
    loss = (exact.logprob[:, 0] * grad.logprob.double()).sum()
    (loss + (exact.entropy * grad.entropy.double()).sum()).backward()
    # Logits carry 64 * 2^-24 of sum |h w| <= |h| |w|; each gradient of a logit is bounded by twice
    # that, times its strength and log p + H <= 2 max |z| + 20; then a product with w (or h) and a
    # sum of 1100 (or `rows`) terms, and one rounding of grad_hidden to its dtype.
    # On CUDA bf16 products take the gradient of the logits rounded to bf16.
    unit = 2.0**-24
    z = (h64 @ w64.t()).abs().amax(-1) / 0.7
    strength = (grad.logprob.abs() + grad.entropy.abs()).double() / 0.7
    error = strength * (2 * z + 20) * unit * (2 * 64 * z + 4 * z + 30)
    rounding = 2**-8 if dtype == torch.bfloat16 else 2.0**-23
    bound_hidden = error[:, None] * 2 * weight.double().abs().amax() + rounding * h64.grad.abs()
    logits64 = (h64 @ w64.t()).detach().requires_grad_()
    again = scores_fp64(logits64, ids[:, None], temperature, everything)
    terms = (again.logprob[:, 0] * grad.logprob.double()).sum()
    (terms + (again.entropy * grad.entropy.double()).sum()).backward()
    early = 2.0**-9 if device == "cuda" and dtype == torch.bfloat16 else 0.0
    size = logits64.grad.abs() * early
    bound_hidden = bound_hidden + size @ weight.double().abs() + 1e-6
    assert bool(((grad_hidden.double() - h64.grad).abs() <= bound_hidden).all())
    bound_weight = (error[:, None] * hidden.double().abs()).sum(0)[None] + rows * unit
    bound_weight = bound_weight + size.t() @ hidden.double().abs()
    assert bool(((grad_weight.double() - w64.grad).abs() <= bound_weight).all())


def test_token_logprobs_bwd_streams_like_one_tile(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(700, 64, generator=generator).bfloat16().to(device)
    weight = prepare_weight(
        torch.randn(1100, 64, generator=generator).to(device), dtype=torch.bfloat16, impl=impl
    )
    ids = torch.randint(1100, (700, 2), generator=generator).to(device)
    options = {"temperature": 0.7, "impl": impl}
    saved = token_logprobs(hidden, weight, ids, entropy=False, **options)
    grad = TokenLogprobs(torch.ones_like(saved.logprob), None, None)
    first, only = token_logprobs_bwd(
        grad, hidden, weight, ids, saved, needs=(False, True), **options
    )
    assert first is None
    again = token_logprobs_bwd(grad, hidden, weight, ids, saved, **options)
    assert_bitwise_equal(again[1], only)
    grad_hidden, none = token_logprobs_bwd(
        grad, hidden, weight, ids, saved, needs=(True, False), **options
    )
    assert none is None
    assert_bitwise_equal(again[0], grad_hidden)


def test_token_logprobs_bwd_rejects_missing_entropy() -> None:
    logits, ids = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    options = {"temperature": 1.0, "impl": "reference"}
    saved = token_logprobs_from_logits(logits, ids, entropy=False, **options)
    grad = TokenLogprobs(None, None, torch.ones(2))
    with pytest.raises(InvalidInputError, match=r"saved.entropy must be the forward's"):
        token_logprobs_from_logits_bwd(grad, logits, ids, saved, **options)
