"""Gradients of a bridged model, several times over: which parameters receive other bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from tiny_models import FAMILIES, VOCAB, tiny_model

from consistent_kernels.testing import bitwise_equal
from train_bridge import bridge_model, deterministic_gradients, token_logprobs

LENGTHS = (1, 65, 300, 129)
"""Several tiles of keys and of rows, whose sums a GPU may add in any order."""

DISTINCT = 40
"""Different tokens: each row of the embedding's gradient is a sum over many."""


def differing_gradients(
    model: torch.nn.Module,
    rounds: int = 3,
    spoil: Callable[[torch.nn.Module, int], None] = lambda model, turn: None,
) -> list[str]:
    """Return the parameters whose gradient of some round is not the first round's, bit for bit.

    Args:
        model: bridged.
        rounds: forwards and backwards of the same batch, each under `deterministic_gradients`.
        spoil: gets model and round after each backward; changes nothing by default.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 3 + DISTINCT, (1, sum(LENGTHS)), generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    weight = torch.randn(ids.shape, generator=generator).to(device)
    first: dict[str, torch.Tensor] = {}
    different: set[str] = set()
    for turn in range(rounds):
        model.zero_grad(set_to_none=True)
        with deterministic_gradients(device.type):
            scores = token_logprobs(model, ids, position_ids=positions, temperature=0.9)
            ((scores.log_probs * weight).sum() + 0.01 * scores.entropy.sum()).backward()
        spoil(model, turn)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        first = first or gradients
        different |= {n for n, grad in gradients.items() if not bitwise_equal(grad, first[n])}
    return sorted(different)


def main() -> None:
    """Print {family: differing parameters} of fp32 masters on a CUDA device, as one JSON line."""
    assert VOCAB >= 3 + DISTINCT
    found = {}
    for family in FAMILIES:
        model = bridge_model(tiny_model(family, dtype=torch.float32).to("cuda"))
        found[family] = differing_gradients(model)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
