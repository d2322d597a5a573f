"""RMSNorm's autograd Functions: the kernel's own tensor forward, gradients onto the master."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.rms_norm import add_rms_norm, rms_norm
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations, norm_weight
from train_bridge.functions.rms_norm import AddRMSNormFunction, RMSNormFunction

EPS = 1e-5


@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_train_equals_infer(master_dtype: torch.dtype) -> None:
    x = hazard_activations((17, 576), seed=1).requires_grad_()
    master = norm_weight(576, seed=2).to(master_dtype).requires_grad_()
    y = RMSNormFunction.apply(x, master, EPS, "reference")
    assert_bitwise_equal(y, rms_norm(x, master.to(x.dtype), EPS, impl="reference"))
    y.float().square().sum().backward()
    assert x.grad.dtype == x.dtype
    assert master.grad.dtype == master_dtype
    assert bool(master.grad.isfinite().all())
    assert bool((master.grad != 0).any())


def test_add_rms_norm_grad_matches_reference() -> None:
    x = hazard_activations((17, 64), seed=3, dtype=torch.float32)
    residual = hazard_activations((17, 64), seed=4, dtype=torch.float32)
    weight = norm_weight(64, seed=5, dtype=torch.float32)
    inputs = [t.clone().requires_grad_() for t in (x, residual, weight)]
    y, total = AddRMSNormFunction.apply(*inputs, EPS, "reference")
    expected_y, expected_total = add_rms_norm(x, residual, weight, EPS, impl="reference")
    assert_bitwise_equal(y, expected_y)
    assert_bitwise_equal(total, expected_total)
    (y.sin().sum() + (total * 0.5).sum()).backward()
    exact = [t.double().requires_grad_() for t in (x, residual, weight)]
    total64 = exact[0] + exact[1]
    y64 = total64 * torch.rsqrt(total64.square().mean(-1, keepdim=True) + EPS) * exact[2]
    (y64.sin().sum() + (total64 * 0.5).sum()).backward()
    for ours, reference in zip(inputs, exact, strict=True):
        # fp32 sums of at most 64 terms: 64 * 2^-24 of the largest magnitude, times a few steps.
        scale = reference.grad.abs().max()
        assert bool(((ours.grad.double() - reference.grad).abs() <= scale * 64 * 2**-22).all())
