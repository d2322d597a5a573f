"""FP8 experts' autograd Function: the op's own tensor forward, straight-through gradients."""

from __future__ import annotations

import pytest
import torch
from expert_cases import Shape, masters, routing, tokens

from consistent_kernels.fp8_experts import fp8_experts, fp8_experts_bwd, quantize_expert_weight
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations
from train_bridge.functions.fp8_experts import Fp8ExpertsFunction

SHAPE = Shape(3, 2, 128, 128)
OPTIONS = {"scale_format": "ue8m0", "impl": "reference"}


@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
def test_fp8_experts_train_equals_infer(master_dtype: torch.dtype) -> None:
    x = tokens(SHAPE, 9, "cpu", seed=1).requires_grad_()
    w13, w2 = (w.to(master_dtype).requires_grad_() for w in masters(SHAPE, "cpu"))
    ids, weights = routing(SHAPE, 9, "cpu", seed=2)
    weights.requires_grad_()
    shared = hazard_activations((9, SHAPE.hidden), seed=4).requires_grad_()
    quantized = tuple(quantize_expert_weight(w, **OPTIONS) for w in (w13, w2))
    y = Fp8ExpertsFunction.apply(
        x, w13, w2, ids, weights, shared, quantized, "ue8m0", 0.5, "reference"
    )
    plain = (x.detach(), *quantized, ids, weights.detach())
    assert_bitwise_equal(y, fp8_experts(*plain, shared.detach(), limit=0.5, **OPTIONS))
    grad = hazard_activations((9, SHAPE.hidden), seed=3)
    y.backward(grad)
    expected = fp8_experts_bwd(grad, *plain, limit=0.5, **OPTIONS)
    for leaf, direct in zip((x, w13, w2, weights), expected, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert_bitwise_equal(leaf.grad, direct.to(leaf.dtype))
    assert_bitwise_equal(shared.grad, grad)
