"""The engine's linear method with packed weights: bits of the plain op, and it follows updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from consistent_kernels.errors import StaleWeightsError
from consistent_kernels.linear import linear
from consistent_kernels.linear.onednn import native_bf16
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations
from vllm_consistent.layers import linear as layers
from vllm_consistent.weights.served import ServedWeights

pytestmark = pytest.mark.skipif(native_bf16() is None, reason="this CPU has no bf16 dot product")


class Layer(torch.nn.Module):
    """What the method reads of vLLM's linear layers."""

    skip_bias_add = False
    params_dtype = torch.bfloat16

    def __init__(self, sizes: list[int], inner: int) -> None:
        super().__init__()
        self.output_partition_sizes = sizes
        values = 0.08 * torch.randn(sum(sizes), inner, generator=torch.Generator().manual_seed(1))
        self.weight = torch.nn.Parameter(values.bfloat16(), requires_grad=False)
        self.quant_method = layers.ConsistentLinearMethod(self)
        self.quant_method.process_weights_after_loading(self)


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Contract:
        def implementation(self, op: str) -> str:
            return "onednn"

    monkeypatch.setattr(layers, "current_contract", lambda _: Contract())


def expected(layer: Layer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    parts = layer.weight.split(layer.output_partition_sizes)
    biases = [None] * len(parts) if bias is None else bias.split(layer.output_partition_sizes)
    pairs = zip(parts, biases, strict=True)
    return torch.cat([linear(x, w.contiguous(), b, impl="onednn") for w, b in pairs], dim=1)


@pytest.mark.parametrize("sizes", [[576], [576, 192, 192], [240, 80, 80], [328, 328]])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_layer_equals_the_plain_op(sizes: list[int], with_bias: bool) -> None:
    layer = Layer(sizes, 576)
    if not layer.quant_method.packed:
        pytest.skip("packing changes bits of this shape on this CPU, so it is not packed")
    x = hazard_activations((21, 576), seed=2)
    bias = hazard_activations((sum(sizes),), seed=3) if with_bias else None
    for rows in (1, 5, 16, 21):
        y = layer.quant_method.apply(layer, x[:rows], bias)
        assert_bitwise_equal(y, expected(layer, x[:rows], bias))


def test_packed_layer_follows_an_update_in_place() -> None:
    layer = Layer([240, 80, 80], 576)
    assert layer.quant_method.packed
    x = hazard_activations((16, 576), seed=4)
    before = layer.quant_method.apply(layer, x)
    numbers = [packed.number for packed in layer.quant_method.packed]
    layer.weight.data.mul_(-2)
    layer.quant_method.process_weights_after_loading(layer)
    after = layer.quant_method.apply(layer, x)
    assert_bitwise_equal(after, expected(layer, x, None))
    assert not torch.equal(before, after)
    assert [packed.number for packed in layer.quant_method.packed] == numbers


def test_control_a_write_past_the_loader_is_found() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer([576], 576)

        def load_weights(self, weights: Any) -> None:
            """Never called here."""

    model = Model()
    served = ServedWeights(model, tied=False)
    served.verify_derived()
    model.layer.weight.data.view(torch.int16)[3, 5] ^= 1
    with pytest.raises(StaleWeightsError, match="packed weight"):
        served.verify_derived()
