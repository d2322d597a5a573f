"""Gradients of the hyper-connection maps against fp64 autograd through an independent formula."""

from __future__ import annotations

import torch

from consistent_kernels.hyper_connections import hc_head_bwd, hc_post_bwd, hc_pre_bwd
from consistent_kernels.testing import hazard_activations
from train_bridge.functions.hyper_connections import (
    HyperConnectionParameters,
    HyperHeadFunction,
    HyperPostFunction,
    HyperPreFunction,
)

EPS, NORM_EPS, ITERATIONS = 1e-6, 1e-6, 20
NUMBERS = {"norm_eps": NORM_EPS, "eps": EPS, "iterations": ITERATIONS}
TOKENS, STREAMS, HIDDEN = 19, 4, 96
INNER = STREAMS * HIDDEN


def mixes_fp64(x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(1)
    return torch.nn.functional.rms_norm(flat, (flat.shape[1],), eps=NORM_EPS) @ fn.t()


def pre_fp64(
    x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m = mixes_fp64(x, fn)
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + EPS
    post = 2.0 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    comb = (m[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4).softmax(-1) + EPS
    comb = comb / (comb.sum(1, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        comb = comb / (comb.sum(2, keepdim=True) + EPS)
        comb = comb / (comb.sum(1, keepdim=True) + EPS)
    return torch.einsum("ts,tsh->th", pre, x), post, comb


def inputs(
    *, columns: int, scales: int, seed: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = hazard_activations((TOKENS, STREAMS, HIDDEN), seed=seed, device=device)
    fn = torch.randn(columns, INNER, generator=generator) * 0.05
    scale = 1.0 + 0.2 * torch.randn(scales, generator=generator)
    base = 0.3 * torch.randn(columns, generator=generator)
    return x, fn.to(device), scale.to(device), base.to(device)


def fp64_leaves(values: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [value.double().requires_grad_() for value in values]


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor, terms: int
) -> None:
    """|actual - expected| <= (terms 2^-24 + one rounding of the dtype) * magnitude.

    `magnitude` bounds the sum of the absolute products that make up an element; a sum of n fp32
    terms in any order errs by at most n 2^-24 of it.
    """
    rounding = 2**-8 if actual.dtype == torch.bfloat16 else 0.0
    bound = magnitude * terms * 2**-24 + expected.abs() * rounding + 1e-30
    difference = (actual.double() - expected).abs()
    assert bool((difference <= bound).all()), float((difference / bound).max())


def test_hc_pre_grad_matches_reference(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    values = inputs(columns=24, scales=3, seed=1, device=device)
    grads = (
        hazard_activations((TOKENS, HIDDEN), seed=2, device=device),
        hazard_activations((TOKENS, STREAMS), seed=3, dtype=torch.float32, device=device),
        hazard_activations((TOKENS, STREAMS, STREAMS), seed=4, dtype=torch.float32, device=device),
    )
    leaves = fp64_leaves(values)
    outputs = pre_fp64(*leaves)
    torch.autograd.backward(outputs, [grad.double() for grad in grads])
    ours = hc_pre_bwd(*grads, *values, **NUMBERS, impl=impl)
    # Every gradient is a chain of sums: over H columns (grad of pre), over 2 x 20 Sinkhorn steps of
    # S terms, over the 24 mixes and over tokens. Its magnitude is at most the largest |grad| times
    # the sums of |x| and |fn| that it meets; the terms add up along the chain.
    x, fn = values[0].double(), values[1].double()
    rstd = torch.rsqrt(x.flatten(1).square().mean(1) + NORM_EPS)
    grad_pre = (grads[0].double().unsqueeze(1) * x).abs().sum(-1).amax(1)
    grad_mix = 2.0 * grad_pre + 4.0 * (grads[1].abs().amax(1) + grads[2].abs().amax((1, 2)))
    reach = grad_mix * rstd
    chain = HIDDEN + INNER + 80 * STREAMS + 64
    own = grads[0].double().abs().amax(1)[:, None, None] * 2.0
    through = reach[:, None] * fn.abs().sum(0) * 2.0
    cross = (reach * rstd * INNER**0.5 * fn.norm(dim=1).sum() * 2.0 / INNER)[:, None] * (
        x.flatten(1).abs()
    )
    assert_close(ours[0], leaves[0].grad, own + (through + cross).view_as(x), chain)
    assert_close(ours[1], leaves[1].grad, (reach[:, None] * x.flatten(1).abs()).sum(0) * 2, chain)
    assert_close(
        ours[2], leaves[2].grad, (reach / rstd).sum() * INNER**0.5 * fn.norm(dim=1).sum(), chain
    )
    assert_close(ours[3], leaves[3].grad, grad_mix.sum().expand(24), chain)


def test_hc_head_grad_matches_reference(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    values = inputs(columns=STREAMS, scales=1, seed=5, device=device)
    grad = hazard_activations((TOKENS, HIDDEN), seed=6, device=device)
    leaves = fp64_leaves(values)
    pre = torch.sigmoid(mixes_fp64(leaves[0], leaves[1]) * leaves[2] + leaves[3]) + EPS
    torch.einsum("ts,tsh->th", pre, leaves[0]).backward(grad.double())
    ours = hc_head_bwd(grad, *values, norm_eps=NORM_EPS, eps=EPS, impl=impl)
    x, fn = values[0].double(), values[1].double()
    rstd = torch.rsqrt(x.flatten(1).square().mean(1) + NORM_EPS)
    reach = (grad.double().unsqueeze(1) * x).abs().sum(-1).amax(1) * rstd
    chain = HIDDEN + INNER + 64
    own = grad.double().abs()[:, None, :] * 2.0
    through = reach[:, None] * fn.abs().sum(0) * 2.0
    cross = (reach * rstd * INNER**0.5 * fn.norm(dim=1).sum() * 2.0 / INNER)[:, None] * (
        x.flatten(1).abs()
    )
    assert_close(ours[0], leaves[0].grad, own + (through + cross).view_as(x), chain)
    assert_close(ours[1], leaves[1].grad, (reach[:, None] * x.flatten(1).abs()).sum(0) * 2, chain)
    assert_close(
        ours[2], leaves[2].grad, (reach / rstd).sum() * INNER**0.5 * fn.norm(dim=1).sum(), chain
    )
    assert_close(ours[3], leaves[3].grad, (reach / rstd).sum().expand(STREAMS), chain)


def test_hc_post_grad_matches_reference(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((TOKENS, STREAMS, HIDDEN), seed=7, device=device)
    y = hazard_activations((TOKENS, HIDDEN), seed=8, device=device)
    post = hazard_activations((TOKENS, STREAMS), seed=9, dtype=torch.float32, device=device)
    comb = hazard_activations((TOKENS, 4, 4), seed=10, dtype=torch.float32, device=device)
    grad = hazard_activations((TOKENS, STREAMS, HIDDEN), seed=11, device=device)
    leaves = fp64_leaves((y, x, post, comb))
    out = leaves[2].unsqueeze(-1) * leaves[0].unsqueeze(1)
    out = out + torch.einsum("tij,tih->tjh", leaves[3], leaves[1])
    out.backward(grad.double())
    ours = hc_post_bwd(grad, y, x, post, comb, impl=impl)
    g, y64, x64 = grad.double().abs(), y.double().abs(), x.double().abs()
    assert_close(ours[0], leaves[0].grad, torch.einsum("ts,tsh->th", post.abs().double(), g), 8)
    assert_close(ours[1], leaves[1].grad, torch.einsum("tij,tjh->tih", comb.abs().double(), g), 8)
    assert_close(ours[2], leaves[2].grad, torch.einsum("th,tsh->ts", y64, g), HIDDEN + 2)
    assert_close(ours[3], leaves[3].grad, torch.einsum("tih,tjh->tij", x64, g), HIDDEN + 2)


def test_control_a_sinkhorn_without_its_gradient_is_out_of_bound() -> None:
    """The bound notices a backward that takes comb for a constant."""
    values = inputs(columns=24, scales=3, seed=12)
    zero = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    grad_comb = hazard_activations((TOKENS, 4, 4), seed=13, dtype=torch.float32)
    leaves = fp64_leaves(values)
    pre_fp64(*leaves)[2].backward(grad_comb.double())
    ours = hc_pre_bwd(zero, torch.zeros(TOKENS, 4), grad_comb, *values, **NUMBERS, impl="reference")
    blind = hc_pre_bwd(
        zero, torch.zeros(TOKENS, 4), torch.zeros_like(grad_comb), *values, **NUMBERS,
        impl="reference",
    )  # fmt: skip
    scale = leaves[3].grad.abs().amax()
    assert float((ours[3].double() - leaves[3].grad).abs().amax() / scale) < 1e-4
    assert float((blind[3].double() - leaves[3].grad).abs().amax() / scale) > 0.1


def test_hyper_functions_return_the_kernel_tensors_and_all_gradients() -> None:
    x, fn, scale, base = inputs(columns=24, scales=3, seed=14)
    head = inputs(columns=STREAMS, scales=1, seed=15)[1:]
    masters = [value.clone().requires_grad_() for value in (x, fn, scale, base, *head)]
    params = HyperConnectionParameters(NORM_EPS, EPS, ITERATIONS)
    out, post, comb = HyperPreFunction.apply(*masters[:4], params, "reference")
    streams = HyperPostFunction.apply(out, masters[0], post, comb, "reference")
    HyperHeadFunction.apply(streams, *masters[4:], NORM_EPS, EPS, "reference").sum().backward()
    for master in masters:
        assert master.grad is not None
        assert master.grad.dtype == master.dtype
        assert bool(master.grad.isfinite().all())
        assert bool(master.grad.abs().sum() > 0)
