"""Linear's autograd Function: the kernel's own tensor forward, gradients onto the master."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels import llvm
from consistent_kernels.linear import linear, linear_bwd, prepare_weight
from consistent_kernels.linear.onednn import native_bf16
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations
from train_bridge.functions.linear import LinearFunction

IMPLEMENTATIONS = (
    "reference",
    pytest.param(
        "llvm",
        marks=pytest.mark.skipif(not llvm.is_available(), reason="needs x86-64 and llvmlite"),
    ),
    pytest.param(
        "onednn",
        marks=pytest.mark.skipif(native_bf16() is None, reason="this CPU has no bf16 dot product"),
    ),
)


def masters(columns: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(columns, inner, generator=generator) * 0.05
    bias = torch.randn(columns, generator=generator)
    return weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
def test_linear_train_equals_infer(
    master_dtype: torch.dtype, out_dtype: torch.dtype | None, impl: str
) -> None:
    x = hazard_activations((19, 192), seed=1).requires_grad_()
    weight, bias = masters(128, 192, master_dtype)
    prepared = prepare_weight(weight, dtype=torch.bfloat16, impl=impl, out_dtype=out_dtype)
    y = LinearFunction.apply(x, weight, bias, prepared, impl, out_dtype)
    rounded = bias.detach().bfloat16()
    assert_bitwise_equal(y, linear(x.detach(), prepared, rounded, impl=impl, out_dtype=out_dtype))
    grad_y = hazard_activations((19, 128), seed=3, dtype=y.dtype)
    y.backward(grad_y)
    grads = linear_bwd(grad_y, x.detach(), prepared, impl=impl)
    assert_bitwise_equal(x.grad, grads[0])
    assert_bitwise_equal(weight.grad, grads[1].to(master_dtype))
    assert_bitwise_equal(bias.grad, grads[2].to(master_dtype))


def test_linear_keeps_infinities_and_negative_zeros() -> None:
    # `kernel + (graph - graph.detach())` would turn these into NaN and +0.0.
    x = torch.ones((1, 64), dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros((64, 64))
    weight[0] = float("inf")
    bias = torch.full((64,), -0.0, dtype=torch.bfloat16)
    prepared = prepare_weight(weight, dtype=torch.bfloat16, impl="reference")
    master = weight.clone().requires_grad_()
    y = LinearFunction.apply(x, master, bias, prepared, "reference", None)
    assert y[0, 0].item() == float("inf")
    assert_bitwise_equal(y, linear(x.detach(), prepared, bias, impl="reference"))


def test_linear_grads_only_where_they_are_wanted() -> None:
    x = hazard_activations((5, 64), seed=4)
    weight, _ = masters(64, 64, torch.float32)
    prepared = prepare_weight(weight, dtype=torch.bfloat16, impl="reference")
    LinearFunction.apply(x, weight, None, prepared, "reference", None).float().sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    frozen = weight.detach()
    x = x.requires_grad_()
    LinearFunction.apply(x, frozen, None, prepared, "reference", None).float().sum().backward()
    assert x.grad is not None
    assert frozen.grad is None


def test_linear_prepared_weight_is_not_prepared_again() -> None:
    x = hazard_activations((5, 64), seed=5)
    weight, _ = masters(64, 64, torch.float32)
    prepared = prepare_weight(torch.zeros_like(weight), dtype=torch.bfloat16, impl="reference")
    y = LinearFunction.apply(x, weight, None, prepared, "reference", None)
    assert bool((y == 0).all()), "the values come from the prepared weight, not from the master"
