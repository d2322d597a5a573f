"""FP8 linear's autograd Function and the store of quantized weights."""

from __future__ import annotations

import pytest
import torch
from implementations import DEEP_GEMM_CUDA, REFERENCE_CPU, TRITON_CUDA
from torch.utils.checkpoint import checkpoint

from consistent_kernels.fp8_linear import fp8_linear, fp8_linear_bwd
from consistent_kernels.fp8_linear.spec import quantization_of
from consistent_kernels.quantization import quantize_rows, quantize_weight
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations
from train_bridge.functions.fp8_linear import Fp8LinearFunction
from train_bridge.functions.quantization import QuantizedWeights
from train_bridge.weight_version import WeightVersion

FORMATS = ("fp32", "ue8m0")
PROGRAMS = (REFERENCE_CPU, TRITON_CUDA, DEEP_GEMM_CUDA)


def master_of(
    columns: int, inner: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(columns, inner, generator=generator) * 0.05
    return weight.to(device, dtype).requires_grad_()


def store(version: WeightVersion, **options: bool) -> QuantizedWeights:
    return QuantizedWeights(version, scale_format="ue8m0", impl="reference", **options)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
def test_fp8_linear_train_equals_infer(
    master_dtype: torch.dtype, scale_format: str, program: tuple[str, str]
) -> None:
    impl, device = program
    x = hazard_activations((19, 512), seed=1, device=device).requires_grad_()
    master = master_of(192, 512, master_dtype, device)
    options = {"scale_format": scale_format, "impl": quantization_of(impl)}
    trained = quantize_weight(master, **options)
    y = Fp8LinearFunction.apply(x, master, *trained, scale_format, impl, None)
    engine = quantize_weight(master.detach().bfloat16(), **options)
    assert_bitwise_equal(y, fp8_linear(x.detach(), *engine, scale_format=scale_format, impl=impl))
    grad_y = hazard_activations((19, 192), seed=3, dtype=y.dtype, device=device)
    y.backward(grad_y)
    quantized = quantize_rows(x.detach(), **options)
    grad_x, grad_weight = fp8_linear_bwd(
        grad_y, *quantized, *trained, weight_dtype=master_dtype, impl=impl
    )
    assert_bitwise_equal(x.grad, grad_x.to(x.dtype))
    assert_bitwise_equal(master.grad, grad_weight)


def test_fp8_linear_gives_fp32_where_asked() -> None:
    x, master = hazard_activations((19, 200), seed=1), master_of(80, 200)
    quantized = quantize_weight(master, scale_format="fp32", impl="reference")
    y = Fp8LinearFunction.apply(x, master, *quantized, "fp32", "reference", torch.float32)
    options = {"scale_format": "fp32", "impl": "reference"}
    assert_bitwise_equal(y, fp8_linear(x, *quantized, **options, out_dtype=torch.float32))


@pytest.mark.parametrize("scale_format", FORMATS)
def test_fp8_linear_straight_through_equals_autograd(scale_format: str) -> None:
    # Autograd through the multiplied values, quantization replaced by the identity.
    x = hazard_activations((33, 256), seed=4)
    master = master_of(128, 256)
    options = {"scale_format": scale_format, "impl": "reference"}
    grad_y = hazard_activations((33, 128), seed=5, dtype=torch.float32)
    values, scale = quantize_weight(master, **options)
    q, s = quantize_rows(x, **options)
    x64 = (q.double() * s.double().repeat_interleave(128, 1)).requires_grad_()
    spread = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    w64 = (values.double() * spread).requires_grad_()
    ((x64 @ w64.t()) * grad_y.double()).sum().backward()
    x32 = x.float().requires_grad_()
    y = Fp8LinearFunction.apply(x32, master, values, scale, scale_format, "reference", None)
    y.backward(grad_y)
    g = grad_y.double().abs()
    # n products and n additions in fp32 of factors rounded once to fp32.
    bound_x = g @ w64.detach().abs() * (128 + 3) * 2**-23
    bound_w = g.t() @ x64.detach().abs() * (33 + 3) * 2**-23
    assert bool(((x32.grad - x64.grad).abs() <= bound_x).all())
    assert bool(((master.grad - w64.grad).abs() <= bound_w).all())


def test_control_gradient_of_the_unquantized_input_differs() -> None:
    x = hazard_activations((33, 256), seed=6).requires_grad_()
    master = master_of(128, 256)
    values, scale = quantize_weight(master, scale_format="fp32", impl="reference")
    y = Fp8LinearFunction.apply(x, master, values, scale, "fp32", "reference", None)
    grad_y = hazard_activations((33, 128), seed=7)
    y.backward(grad_y)
    assert not bitwise_equal(master.grad, grad_y.float().t() @ x.detach().float())


def test_fp8_linear_recomputed_equals_kept() -> None:
    x = hazard_activations((17, 256), seed=8)
    master = master_of(128, 256)
    weights = store(WeightVersion())

    def layer(value: torch.Tensor) -> torch.Tensor:
        quantized = weights.get("layer", master)
        return Fp8LinearFunction.apply(value, master, *quantized, "ue8m0", "reference", None)

    results = []
    for recompute in (False, True):
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=False) if recompute else layer(leaf)
        y.float().square().sum().backward()
        results.append((y.detach(), leaf.grad, master.grad))
        master.grad = None
    for kept, again in zip(*results, strict=True):
        assert_bitwise_equal(again, kept)


def test_fp8_linear_grads_only_where_they_are_wanted() -> None:
    x = hazard_activations((5, 128), seed=9)
    master = master_of(128, 128)
    quantized = quantize_weight(master, scale_format="fp32", impl="reference")
    rest = (*quantized, "fp32", "reference", None)
    Fp8LinearFunction.apply(x, master, *rest).float().sum().backward()
    assert x.grad is None
    assert master.grad is not None
    frozen = master.detach()
    x = x.requires_grad_()
    Fp8LinearFunction.apply(x, frozen, *rest).float().sum().backward()
    assert x.grad is not None


def test_quantized_weights_are_kept_for_one_version() -> None:
    version, master = WeightVersion(), master_of(128, 256)
    weights = store(version)
    first = weights.get("layer", master)
    assert weights.get("layer", master)[0] is first[0]
    version.bump()
    again = weights.get("layer", master)
    assert again[0] is not first[0]
    assert_bitwise_equal(again[0], first[0])
    with torch.no_grad():
        master.mul_(2.0)
    changed = weights.get("layer", master)
    assert_bitwise_equal(changed[0], first[0])
    assert_bitwise_equal(changed[1], first[1] * 2)
    weights.forget()
    assert weights.get("layer", master)[0] is not changed[0]


def test_quantized_weights_find_a_change_that_no_counter_sees() -> None:
    master = master_of(128, 256)
    weights = store(WeightVersion())
    weights.get("layer", master)
    assert weights.changed({"layer": master}) == []
    master.data[0, 0] += 1.0
    assert weights.changed({"layer": master}) == ["layer"]
    weights.forget()
    assert weights.changed({"layer": master}) == []


def test_quantized_weights_of_a_sharded_model_are_not_kept() -> None:
    master = master_of(128, 256)
    weights = store(WeightVersion(), keep=False)
    assert weights.get("layer", master)[0] is not weights.get("layer", master)[0]


def test_quantized_weights_made_in_inference_mode_serve_a_backward() -> None:
    master = master_of(128, 256)
    weights = store(WeightVersion())
    with torch.inference_mode():
        weights.get("layer", master)
    x = hazard_activations((3, 256), seed=10).requires_grad_()
    rest = ("ue8m0", "reference", None)
    Fp8LinearFunction.apply(x, master, *weights.get("layer", master), *rest).sum().backward()
    assert x.grad is not None
