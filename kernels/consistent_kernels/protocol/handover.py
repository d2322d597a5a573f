"""What a trainer sends along with its weights, inside the weight stream itself.

A framework's own transport carries named tensors from the trainer to the engine and brings nothing
back. So the last tensor of a stream is not a parameter but this record, and the engine's worker
compares: its receipt with the trainer's, its report with the trainer's. An engine without our
worker extension does not know the name and fails to load it, so a missing plugin cannot go unseen.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

from consistent_kernels.errors import invalid
from consistent_kernels.protocol.report import ConsistencyReport
from consistent_kernels.protocol.weights import WeightReceipt

HANDOVER_NAME = "consistency_handover"
"""Name of the record in a stream; no model has a parameter of this name."""


@dataclasses.dataclass(frozen=True)
class Handover:
    """What the engine must agree with.

    Attributes:
        receipt: version, digests and contract of the weights just sent.
        report: the trainer's own account.
        served: whether the trainer has run a forward on tokens that this engine sampled; then
            every op of the contract must have been called on both sides.
    """

    receipt: WeightReceipt
    report: ConsistencyReport
    served: bool = False

    def to_tensor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the record as uint8 [n]: UTF-8 JSON."""
        data: dict[str, Any] = {
            "receipt": self.receipt.to_dict(),
            "report": self.report.to_dict(),
            "served": self.served,
        }
        text = json.dumps(data, default=dict).encode()
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Handover:
        """Rebuild from `to_tensor()`.

        Raises:
            InvalidInputError: the tensor is no such record, or one of another version.
        """
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise invalid("Handover", "tensor", "uint8 [n]", f"{tensor.dtype} {list(tensor.shape)}")
        try:
            data = json.loads(bytes(tensor.cpu().numpy()))
            return cls(
                WeightReceipt.from_dict(data["receipt"]),
                ConsistencyReport.from_dict(data["report"]),
                bool(data["served"]),
            )
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise invalid(
                "Handover",
                "tensor",
                "a record of this version",
                repr(error),
                "Install the same version of this project on both sides",
            ) from error


def split_handover(
    named: list[tuple[str, torch.Tensor]],
) -> tuple[list[tuple[str, torch.Tensor]], Handover | None]:
    """Return the parameters of a bucket, and the record if the bucket holds it."""
    weights = [(name, tensor) for name, tensor in named if name != HANDOVER_NAME]
    records = [tensor for name, tensor in named if name == HANDOVER_NAME]
    return weights, Handover.from_tensor(records[-1]) if records else None
