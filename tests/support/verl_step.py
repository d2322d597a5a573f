"""A step's samples, equal on both sides, and a fault to put into them."""

from __future__ import annotations

from typing import Any

import torch

KEYS = ["a_0_0", "a_1_0", "b_0_0"]
LENGTHS = [(3, 4), (3, 2), (5, 3)]


def step(**changes: Any) -> dict[str, torch.Tensor]:
    """Three samples of different lengths, equal on both sides."""
    torch.manual_seed(0)

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    log_probs = [-torch.rand(response) for _, response in LENGTHS]
    fields = {
        "input_ids": jagged([torch.arange(p + r) + 10 for p, r in LENGTHS]),
        "position_ids": jagged([torch.arange(p + r) for p, r in LENGTHS]),
        "responses": jagged([torch.arange(p, p + r) + 10 for p, r in LENGTHS]),
        "response_mask": jagged([torch.ones(r, dtype=torch.int64) for _, r in LENGTHS]),
        "rollout_log_probs": jagged(log_probs),
        "old_log_probs": jagged([row.clone() for row in log_probs]),
    }
    return fields | changes


def flipped(fields: dict[str, torch.Tensor], sample: int, position: int) -> None:
    """Change the last bit of one old log-prob."""
    row = fields["old_log_probs"].unbind()[sample]
    row.view(torch.int32)[position] ^= 1
