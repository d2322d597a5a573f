"""Relations of RMSNorm: rows alone and together, fused and separate, against fp64."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_bwd
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    norm_weight,
    poisoned_rows,
)

HIDDEN_SIZES = (64, 80, 128, 576, 2048)
EPS = 1e-5


def rms_norm_fp64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_rms_norm_matches_reference(impl_device: tuple[str, str], hidden: int) -> None:
    impl, device = impl_device
    x = hazard_activations((257, hidden), seed=1, device=device)
    weight = norm_weight(hidden, seed=2, device=device)
    expected = rms_norm_fp64(x, weight, EPS)
    y = rms_norm(x, weight, EPS, impl=impl)
    # One bf16 rounding is at most 2^-8 of the value; the fp32 chain before it (an 11-level tree, or
    # 8 levels after 16 additions a lane; sqrt, division, two products) adds less than 2^-19.
    bound = expected.abs() * (2**-8 + 2**-18) + 1e-38
    assert bool(((y.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_rms_norm_is_batch_invariant(impl_device: tuple[str, str], hidden: int) -> None:
    impl, device = impl_device
    x = hazard_activations((257, hidden), seed=3, device=device)
    residual = hazard_activations((257, hidden), seed=4, device=device)
    weight = norm_weight(hidden, seed=5, device=device)
    whole = rms_norm(x, weight, EPS, impl=impl)
    whole_y, whole_sum = add_rms_norm(x, residual, weight, EPS, impl=impl)
    for rows in BATCH_SIZES:
        for start in {0, (257 - rows) // 2, 257 - rows}:
            part = slice(start, start + rows)
            assert_bitwise_equal(rms_norm(x[part], weight, EPS, impl=impl), whole[part])
            y, total = add_rms_norm(x[part], residual[part], weight, EPS, impl=impl)
            assert_bitwise_equal(y, whole_y[part])
            assert_bitwise_equal(total, whole_sum[part])


def test_rms_norm_residual_is_separate_addition(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((33, 576), seed=6, device=device)
    residual = hazard_activations((33, 576), seed=7, device=device)
    weight = norm_weight(576, seed=8, device=device)
    y, total = add_rms_norm(x, residual, weight, EPS, impl=impl)
    assert_bitwise_equal(total, (x.float() + residual.float()).to(x.dtype))
    assert_bitwise_equal(y, rms_norm(total, weight, EPS, impl=impl))


def test_rms_norm_heads_are_rows(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    qkv = hazard_activations((17, 3 * 4 * 64), seed=9, device=device)
    weight = norm_weight(64, seed=10, device=device)
    heads = qkv[:, 256:512].view(17, 4, 64)
    expected = torch.stack(
        [rms_norm(heads[:, h].contiguous(), weight, EPS, impl=impl) for h in range(4)], dim=1
    )
    assert_bitwise_equal(rms_norm(heads, weight, EPS, impl=impl), expected)


def test_rms_norm_ignores_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((9, 576), seed=11, device=device)
    weight = norm_weight(576, seed=12, device=device)
    buffer, rows = poisoned_rows(x, before=3, after=4)
    assert_bitwise_equal(
        rms_norm(buffer, weight, EPS, impl=impl)[rows], rms_norm(x, weight, EPS, impl=impl)
    )


def test_rms_norm_is_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((129, 576), seed=13, device=device)
    weight = norm_weight(576, seed=14, device=device)
    first = rms_norm(x, weight, EPS, impl=impl)
    for _ in range(10):
        assert_bitwise_equal(rms_norm(x, weight, EPS, impl=impl), first)


@pytest.mark.parametrize("hidden", [64, 576])
def test_rms_norm_compiled_equals_eager(impl_device: tuple[str, str], hidden: int) -> None:
    impl, device = impl_device
    x = hazard_activations((17, hidden), seed=15, device=device)
    weight = norm_weight(hidden, seed=16, device=device)

    def two_norms(value: torch.Tensor) -> torch.Tensor:
        return rms_norm(rms_norm(value, weight, EPS, impl=impl), weight, EPS, impl=impl)

    # aot_eager traces through the fake op without a C++ compiler; CUDA uses Inductor.
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(two_norms, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(x), two_norms(x))


def test_control_rounding_before_the_weight_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((64, 576), seed=17, device=device)
    weight = norm_weight(576, seed=18, device=device)
    x32 = x.float()
    normalized = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    hugging_face_order = weight * normalized
    assert not bitwise_equal(hugging_face_order, rms_norm(x, weight, EPS, impl=impl))


def test_control_unrounded_residual_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((64, 576), seed=19, device=device)
    residual = hazard_activations((64, 576), seed=20, device=device)
    weight = norm_weight(576, seed=21, device=device)
    y, _ = add_rms_norm(x, residual, weight, EPS, impl=impl)
    unrounded = rms_norm(x.float() + residual.float(), weight, EPS, impl=impl).to(x.dtype)
    assert not bitwise_equal(unrounded, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_grad_matches_reference(dtype: torch.dtype, impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((33, 576), seed=22, dtype=dtype, device=device)
    weight = norm_weight(576, seed=23, dtype=dtype, device=device)
    grad_y = hazard_activations((33, 576), seed=24, dtype=dtype, device=device)
    x64 = x.double().requires_grad_()
    w64 = weight.double().requires_grad_()
    (rms_norm_fp64(x64, w64, EPS) * grad_y.double()).sum().backward()
    grad_x, grad_weight = rms_norm_bwd(grad_y, x, weight, EPS, impl=impl)
    # fp32 dot of 576 terms: relative error below 576 * 2^-24 of the sum of magnitudes, which is
    # at most the row's largest |gradient| times the number of terms' share; one rounding of x.
    unit = 2**-24 if dtype == torch.float32 else 2**-8
    scale_x = x64.grad.abs().amax(-1, keepdim=True)
    assert bool(((grad_x.double() - x64.grad).abs() <= scale_x * (unit * 2 + 576 * 2**-24)).all())
    magnitude = (grad_y.double() * rms_norm_fp64(x, torch.ones_like(weight), EPS)).abs().sum(0)
    assert bool(((grad_weight.double() - w64.grad).abs() <= magnitude * 64 * 2**-24 + 1e-30).all())


def test_rms_norm_rejects_bad_inputs() -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(InvalidInputError, match=r"weight must be of shape \(8,\), got \(7,\)"):
        rms_norm(x, torch.ones(7), EPS, impl="reference")
    with pytest.raises(InvalidInputError, match="x must be bfloat16, float16 or float32"):
        rms_norm(x.int(), torch.ones(8), EPS, impl="reference")
    with pytest.raises(InvalidInputError, match="residual must be"):
        add_rms_norm(x, x.float(), torch.ones(8), EPS, impl="reference")
    with pytest.raises(
        UnsupportedError, match="impl 'cuda' is not supported; supported: reference"
    ):
        rms_norm(x, torch.ones(8), EPS, impl="cuda")
