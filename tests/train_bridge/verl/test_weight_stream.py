"""The stream of weights: what is sent, what closes it, what it refuses."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from consistent_kernels.errors import ConsistencyError, InvalidInputError
from consistent_kernels.protocol import HANDOVER_NAME, Handover
from train_bridge import bridge_model, weight_version
from train_bridge.verl.weight_stream import weight_stream
from train_bridge.weights import weight_receipt


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return bridge_model(tiny_model(request.param, dtype=torch.float32))


def test_weight_stream_closes_with_the_models_receipt(model: torch.nn.Module) -> None:
    weight_version(model).value = 5
    *weights, (name, record) = weight_stream(model, model.state_dict().items(), served=True)
    assert name == HANDOVER_NAME
    handover = Handover.from_tensor(record)
    assert handover.receipt == weight_receipt(model)
    assert handover.receipt.version == 5
    assert handover.served
    assert handover.report.role == "trainer"
    assert {name for name, _ in weights} == {name for name, _ in model.named_parameters()}
    assert {tensor.dtype for _, tensor in weights} == {torch.bfloat16}


def test_weight_stream_rejects_a_missing_parameter(model: torch.nn.Module) -> None:
    named = [(n, p) for n, p in model.named_parameters() if n != "model.norm.weight"]
    with pytest.raises(ConsistencyError, match=r"model\.norm\.weight"):
        list(weight_stream(model, named, served=False))


def test_weight_stream_rejects_a_parameter_that_is_not_finite(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(InvalidInputError, match=r"model\.norm\.weight"):
        list(weight_stream(model, model.named_parameters(), served=False))
