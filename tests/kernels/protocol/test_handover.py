"""The record at the end of a weight stream."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.protocol import HANDOVER_NAME, Handover, split_handover, state_digest
from consistent_kernels.protocol.report import ConsistencyReport
from consistent_kernels.protocol.weights import WeightReceipt


def record(served: bool = True) -> Handover:
    weights = {"b": torch.tensor([1.0, -0.0]), "a": torch.ones(2, 3)}
    report = ConsistencyReport(
        role="trainer",
        requested=True,
        registered=True,
        contract={"name": "x", "model": {}},
        digest="d",
        runner="train_bridge",
        device="cpu",
        foreign_layers=["one"],
        calls={"linear": {"reference": 3}},
    )
    return Handover(WeightReceipt(7, state_digest(weights.items()), "d"), report, served)


@pytest.mark.parametrize("served", [True, False])
def test_handover_comes_back_as_sent(served: bool) -> None:
    sent = record(served)
    assert Handover.from_tensor(sent.to_tensor()) == sent


def test_handover_leaves_the_bucket_it_came_in() -> None:
    weights = [("a", torch.ones(2))]
    rest, found = split_handover([*weights, (HANDOVER_NAME, record().to_tensor())])
    assert [name for name, _ in rest] == ["a"]
    assert found == record()
    assert split_handover(weights)[1] is None


def test_handover_rejects_an_altered_record() -> None:
    data = record().to_tensor()
    text = bytes(data.numpy()).replace(b'"total": "', b'"total": "0')
    altered = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with pytest.raises(InvalidInputError, match="altered"):
        Handover.from_tensor(altered)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4),
        torch.zeros(4, dtype=torch.uint8),
        torch.tensor([123, 125], dtype=torch.uint8),
    ],
)
def test_handover_rejects_other_tensors(tensor: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match="Handover"):
        Handover.from_tensor(tensor)
