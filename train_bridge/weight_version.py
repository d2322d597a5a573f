"""Which version the weights are of, and in which dtypes they come."""

from __future__ import annotations

import torch

MODEL_DTYPE = torch.bfloat16
"""Activations and rounded weights; masters may be fp32."""

MASTER_DTYPES = (torch.float32, torch.bfloat16)
"""What rounds to the engine's weight in one step."""


class WeightVersion:
    """A counter that grows by one whenever the weights change; 0 is the loaded checkpoint."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def bump(self) -> int:
        """Say that weights changed; returns the new version."""
        self.value += 1
        return self.value
