"""Autograd Functions of rotary, silu_and_mul, embedding: own tensors, gradients as `<op>_bwd`."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.embedding import embedding, embedding_bwd
from consistent_kernels.rotary import RopeParameters, rotary, rotary_bwd
from consistent_kernels.silu_and_mul import silu_and_mul, silu_and_mul_bwd
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations
from train_bridge.functions.embedding import EmbeddingFunction
from train_bridge.functions.rotary import RotaryFunction
from train_bridge.functions.silu_and_mul import SiluAndMulFunction


def test_silu_and_mul_train_equals_infer() -> None:
    fused = hazard_activations((17, 640), seed=1)
    gate, up = fused[:, :320].requires_grad_(), fused[:, 320:].requires_grad_()
    y = SiluAndMulFunction.apply(gate, up, "reference")
    assert_bitwise_equal(y, silu_and_mul(gate.detach(), up.detach(), impl="reference"))
    grad_y = hazard_activations((17, 320), seed=2)
    y.backward(grad_y)
    expected = silu_and_mul_bwd(grad_y, gate.detach(), up.detach(), impl="reference")
    assert_bitwise_equal(gate.grad, expected[0])
    assert_bitwise_equal(up.grad, expected[1])


def test_rotary_train_equals_infer() -> None:
    rope = RopeParameters(64, 64, 1e5, 512)
    positions = torch.randperm(512, generator=torch.Generator().manual_seed(3))[:33]
    q = hazard_activations((33, 3, 64), seed=4).requires_grad_()
    k = hazard_activations((33, 1, 64), seed=5).requires_grad_()
    outputs = RotaryFunction.apply(positions, q, k, rope, "reference")
    expected = rotary(positions, q.detach(), k.detach(), rope=rope, impl="reference")
    for actual, value in zip(outputs, expected, strict=True):
        assert_bitwise_equal(actual, value)
    grads = [hazard_activations(t.shape, seed=6 + i) for i, t in enumerate(outputs)]
    torch.autograd.backward(outputs, grads)
    expected = rotary_bwd(positions, *grads, rope=rope, impl="reference")
    assert_bitwise_equal(q.grad, expected[0])
    assert_bitwise_equal(k.grad, expected[1])


def test_rotary_grad_of_one_output_alone() -> None:
    rope = RopeParameters(64, 64, 1e5, 512)
    q = hazard_activations((5, 3, 64), seed=8).requires_grad_()
    k = hazard_activations((5, 1, 64), seed=9).requires_grad_()
    rotated, _ = RotaryFunction.apply(torch.arange(5), q, k, rope, "reference")
    rotated.float().sum().backward()
    assert bool(q.grad.isfinite().all())
    assert bool((k.grad == 0).all())


@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
def test_embedding_train_equals_infer(master_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(10)
    master = torch.randn(64, 192, generator=generator).to(master_dtype).requires_grad_()
    ids = torch.randint(64, (33,), generator=generator)
    y = EmbeddingFunction.apply(ids, master, torch.bfloat16, "reference")
    assert_bitwise_equal(y, embedding(ids, master.detach().bfloat16(), impl="reference"))
    grad_y = hazard_activations((33, 192), seed=11)
    y.backward(grad_y)
    expected = embedding_bwd(grad_y, ids, 64, impl="reference")
    assert_bitwise_equal(master.grad, expected.to(master_dtype))
