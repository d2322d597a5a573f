"""Gradients of an attention block, taken twice of one batch: do they repeat bit for bit?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from block_cases import BLOCKS, BlockCase

from consistent_kernels.testing import bitwise_equal
from train_bridge.blocks import PackedSequences
from train_bridge.determinism import deterministic_gradients

LENGTHS = [9, 140, 1]
Spoil = Callable[[dict[str, torch.Tensor], int], None]


def differing_gradients(case: BlockCase, spoil: Spoil | None = None) -> list[str]:
    """Return the names of the gradients that differ between two rounds.

    Args:
        case: a block.
        spoil: changes the gradients of a round, for a control.
    """
    hidden = case.hidden(sum(LENGTHS), seed=6)
    sequences = PackedSequences.from_lengths(LENGTHS, case.device)
    rounds = []
    for turn in range(2):
        block, leaf = case.trainer(), hidden.clone().requires_grad_()
        with deterministic_gradients(case.device):
            block(leaf, sequences).backward(hidden.flip(0))
        grads = {name: master.grad for name, master in block.named_parameters()}
        rounds.append({"hidden": leaf.grad, **grads})
        if spoil is not None:
            spoil(rounds[-1], turn)
    first, second = rounds
    return sorted(name for name in first if not bitwise_equal(first[name], second[name]))


def main() -> None:
    """Print {block: differing gradients} on a CUDA device, as one JSON line."""
    found = {name: differing_gradients(BlockCase.make(name, "cuda")) for name in BLOCKS}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
