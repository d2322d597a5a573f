"""The experts' autograd Function: the kernel's own tensor forward, gradients onto the masters."""

from __future__ import annotations

import pytest
import torch
from expert_cases import SHAPES, masters, prepared, routing, tokens

from consistent_kernels.experts import experts, experts_bwd
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations
from train_bridge.functions.experts import ExpertsFunction

TINY = SHAPES["tiny"]


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
def test_experts_train_equals_infer(master_dtype: torch.dtype, limit: float | None) -> None:
    x = tokens(TINY, 19, "cpu", seed=1).requires_grad_()
    w13, w2 = (w.to(master_dtype).requires_grad_() for w in masters(TINY, "cpu"))
    ids, weights = routing(TINY, 19, "cpu", seed=2)
    weights.requires_grad_()
    shared = hazard_activations((19, TINY.hidden), seed=3).requires_grad_()
    both = prepared(TINY, "reference", "cpu")
    y = ExpertsFunction.apply(x, w13, w2, ids, weights, shared, both, limit, "reference")
    plain = (x.detach(), *both, ids, weights.detach())
    assert_bitwise_equal(y, experts(*plain, shared.detach(), limit=limit, impl="reference"))
    grad = hazard_activations((19, TINY.hidden), seed=4)
    y.backward(grad)
    expected = experts_bwd(grad, *plain, limit=limit, impl="reference")
    assert_bitwise_equal(x.grad, expected[0])
    assert_bitwise_equal(w13.grad, expected[1].to(master_dtype))
    assert_bitwise_equal(w2.grad, expected[2].to(master_dtype))
    assert_bitwise_equal(weights.grad, expected[3])
    assert_bitwise_equal(shared.grad, grad)


def test_experts_grads_only_where_they_are_wanted() -> None:
    x = tokens(TINY, 5, "cpu", seed=5)
    w13, w2 = masters(TINY, "cpu")
    w2.requires_grad_()
    ids, weights = routing(TINY, 5, "cpu", seed=6)
    both = prepared(TINY, "reference", "cpu")
    y = ExpertsFunction.apply(x, w13, w2, ids, weights, None, both, None, "reference")
    y.float().sum().backward()
    assert w13.grad is None
    assert bool(w2.grad.any())
