"""The router's autograd Function: the kernel's own tensors, the gradient of its weights."""

from __future__ import annotations

import torch
from router_cases import case

from consistent_kernels.linear import prepare_weight
from consistent_kernels.router import router, router_bwd
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations
from train_bridge.functions.linear import LinearFunction
from train_bridge.functions.router import RouterFunction


def test_router_train_equals_infer() -> None:
    for name in ("qwen3", "deepseek-v3"):
        logits, bias, p = case(name, 19, "cpu", seed=1)
        logits.requires_grad_()
        ids, weights = RouterFunction.apply(logits, bias, None, None, p, "reference")
        expected = router(logits.detach(), bias, parameters=p, impl="reference")
        assert_bitwise_equal(ids, expected[0])
        assert_bitwise_equal(weights, expected[1])
        assert not ids.requires_grad
        grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
        weights.backward(grad)
        direct = router_bwd(grad, logits.detach(), ids, parameters=p, impl="reference")
        assert_bitwise_equal(logits.grad, direct)


def test_router_gradient_reaches_the_gate() -> None:
    _, _, p = case("qwen3", 1, "cpu", seed=3)
    x = hazard_activations((7, 192), seed=4).requires_grad_()
    gate = torch.randn((128, 192), generator=torch.Generator().manual_seed(5)) * 0.05
    gate.requires_grad_()
    fp32 = torch.float32
    prepared = prepare_weight(gate, dtype=torch.bfloat16, impl="reference", out_dtype=fp32)
    logits = LinearFunction.apply(x, gate, None, prepared, "reference", fp32)
    _, weights = RouterFunction.apply(logits, None, None, None, p, "reference")
    (weights * torch.arange(8.0)).sum().backward()
    assert bool(gate.grad.any())
    assert bool(x.grad.any())
