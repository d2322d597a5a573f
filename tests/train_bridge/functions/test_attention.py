"""Attention's autograd Function: the kernel's own tensor forward, gradients end to end."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CASES, attention_fp64, borders, make_batch

from consistent_kernels.attention import AttentionParameters, plan_attention
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge.functions.attention import AttentionFunction

LENGTHS = (1, 17, 65, 140)

chosen = ("smollm2", "mqa96-window70-split64", "gqa128-split128")
cases = pytest.mark.parametrize("params", [CASES[name] for name in chosen], ids=chosen)


@cases
@pytest.mark.parametrize("with_plan", [False, True])
def test_attention_train_equals_infer(params: AttentionParameters, with_plan: bool) -> None:
    batch = make_batch(params, "reference", "cpu", lengths=LENGTHS)
    cu = borders(LENGTHS)
    tokens = batch.q.shape[0]
    plan = None
    if with_plan:
        plan = plan_attention(
            cu, params=params, num_tokens=tokens, impl="reference", cu_seqlens_k=cu
        )
    q = batch.q.clone().requires_grad_()
    out = AttentionFunction.apply(q, batch.k, batch.v, cu, cu, params, "reference", plan)
    assert_bitwise_equal(out, batch.attend()[0])
    out.float().square().sum().backward()
    assert q.grad.dtype == q.dtype
    assert bool(q.grad.isfinite().all())
    assert bool((q.grad != 0).any())


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_grad_matches_reference(params: AttentionParameters, dtype: torch.dtype) -> None:
    batch = make_batch(params, "reference", "cpu", lengths=LENGTHS, dtype=dtype)
    inputs = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    cu = borders(LENGTHS)
    out = AttentionFunction.apply(*inputs, cu, cu, params, "reference")
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    (out * weight).sum().backward()

    exact = [x.double().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    naive = make_batch(params, "reference", "cpu", lengths=LENGTHS, dtype=dtype)
    naive.q, naive.k, naive.v = exact
    (attention_fp64(naive).out * weight.double()).sum().backward()
    # The error of each gradient is bounded by roundings of sums of magnitudes; element by element
    # in tests/kernels/attention. Here against the largest gradient: bf16 rounds P, out and the
    # gradient (3 of 2^-8, and P and out enter products of two such); fp32 sums below 2^10 terms.
    unit = 2**-24 * 2**10 if dtype == torch.float32 else 6 * 2**-8
    for ours, reference in zip(inputs, exact, strict=True):
        assert ours.grad.dtype == dtype
        scale = float(reference.grad.abs().max())
        assert float((ours.grad.double() - reference.grad).abs().max()) <= unit * scale


def test_attention_grad_with_recompute_equals_without() -> None:
    from torch.utils.checkpoint import checkpoint

    batch = make_batch(CASES["smollm2"], "reference", "cpu", lengths=LENGTHS)
    cu = borders(LENGTHS)
    plan = plan_attention(
        cu,
        params=batch.params,
        num_tokens=batch.q.shape[0],
        impl="reference",
        cu_seqlens_k=cu,
    )

    def layers(q: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            q = AttentionFunction.apply(
                q, batch.k, batch.v, cu, cu, batch.params, "reference", plan
            )
        return q

    grads = []
    for recompute in (False, True):
        q = batch.q.clone().requires_grad_()
        out = checkpoint(layers, q, use_reentrant=False) if recompute else layers(q)
        out.float().sum().backward()
        grads.append((out.detach(), q.grad))
    assert_bitwise_equal(grads[1][0], grads[0][0])
    assert_bitwise_equal(grads[1][1], grads[0][1])


def test_control_grad_of_another_scale_fails() -> None:
    params = CASES["smollm2"]
    batch = make_batch(params, "reference", "cpu", lengths=(65,), dtype=torch.float32)
    cu = borders((65,))
    grads = []
    for scale in (params.scale, params.scale * 1.001):
        q = batch.q.clone().requires_grad_()
        other = AttentionParameters(9, 3, 64, scale)
        AttentionFunction.apply(q, batch.k, batch.v, cu, cu, other, "reference").sum().backward()
        grads.append(q.grad)
    assert float((grads[1] - grads[0]).abs().max()) > 2**-14 * float(grads[0].abs().max())
