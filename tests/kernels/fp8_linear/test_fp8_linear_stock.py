"""FP8 linear beside vLLM's own kernel on a CPU, within a stated bound."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.fp8_linear import fp8_linear
from consistent_kernels.quantization import (
    dequantize_blocks,
    dequantize_rows,
    quantize_rows,
    quantize_weight,
)
from consistent_kernels.testing import hazard_activations

U, UNIT = 2.0**-8, 2.0**-23
"""Half a unit of bf16; a unit of fp32."""


def stock_kernel() -> object:
    """vLLM's `fp8_scaled_mm_cpu`: bf16 rows, e4m3 weights with a scale a block."""
    pytest.importorskip("vllm._custom_ops", reason="vLLM is not installed")
    if not hasattr(torch.ops._C, "fp8_scaled_mm_cpu"):
        pytest.skip("this vLLM has no FP8 linear for CPUs")
    return torch.ops._C


def outside(weight: tuple[torch.Tensor, torch.Tensor], scale_format: str, ours: tuple) -> float:
    """The share of outputs of `ours` that are further from stock's of `weight` than the bound.

    Stock quantizes no rows, so they get values that power-of-two scales hold exactly, and both
    multiply the same x. Stock multiplies q by its scale and rounds that to bf16 where the scale is
    no power of two (U of a term); both add K products in fp32, in different orders (K + 2 units of
    the magnitudes on each side), and round once (U of the result each).
    """
    stock = stock_kernel()
    x = hazard_activations((33, weight[0].shape[1]), seed=1)
    x = dequantize_rows(*quantize_rows(x, scale_format="ue8m0", impl="reference")).bfloat16()
    packed = stock.convert_weight_packed(weight[0])
    theirs = stock.fp8_scaled_mm_cpu(x, packed, weight[1], [128, 128], None, x.dtype, True)
    actual = fp8_linear(x, *ours, scale_format="ue8m0", impl="reference")
    w64 = dequantize_blocks(*weight).double()
    exact, magnitude = x.double() @ w64.t(), x.double().abs() @ w64.abs().t()
    terms = 2 * (x.shape[1] + 2) * UNIT + (U if scale_format == "fp32" else 0.0)
    bound = magnitude * terms * (1 + U) + 2 * U * (exact.abs() + magnitude * terms)
    return float(((actual.double() - theirs.double()).abs() > bound).double().mean())


def weights(scale_format: str, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    master = torch.randn((256, 512), generator=torch.Generator().manual_seed(seed)) * 0.05
    return quantize_weight(master, scale_format=scale_format, impl="reference")


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_fp8_linear_agrees_with_vllm(scale_format: str) -> None:
    weight = weights(scale_format, seed=2)
    assert outside(weight, scale_format, weight) == 0.0


def test_control_neighbours_of_a_weight_are_outside_the_bound() -> None:
    values, scale = weights("ue8m0", seed=2)
    # Every weight one e4m3 number further from zero: about 2^-4 of it, sixteen times U.
    bytes_ = values.view(torch.uint8)
    further = torch.where((bytes_ & 0x7F) < 0x7E, bytes_ + 1, bytes_).view(values.dtype)
    assert outside((values, scale), "ue8m0", (further, scale)) > 0.5
