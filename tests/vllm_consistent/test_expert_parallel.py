"""An engine's expert block on two ranks has the bits of a trainer's on four, and of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import expert_parallel_layers as layers
import pytest
import torch
from child_process import run_python

from consistent_kernels.experts import experts, prepare_expert_weight
from consistent_kernels.protocol.weights import WeightReceipt, state_digest
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Callable[[str], Path]) -> str:
    return str(checkpoints("qwen3_moe"))


@pytest.fixture(scope="module")
def results(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each rank wrote, by file name."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_python(layers.__file__, checkpoint, folder, timeout=300, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
    return {file.stem: torch.load(file, weights_only=False) for file in folder.glob("*.pt")}


def test_engine_on_two_ranks_equals_one_process(results: dict[str, Any]) -> None:
    alone = results["alone"]
    for rank in range(layers.ENGINE_RANKS):
        part = layers.share(rank, layers.ENGINE_RANKS + 1)
        assert_bitwise_equal(results[f"engine{rank}"]["y"], alone[part], f"engine rank {rank}")
    held = [results[f"engine{rank}"]["held"] for rank in range(layers.ENGINE_RANKS)]
    assert held == [slice(0, 8), slice(8, 16)]


def test_trainer_on_four_ranks_equals_the_engine_on_two(results: dict[str, Any]) -> None:
    trainer = torch.cat([results[f"trainer{r}"]["y"] for r in range(layers.TRAINER_RANKS)])
    engine = torch.cat([results[f"engine{r}"]["y"] for r in range(layers.ENGINE_RANKS)])
    assert len(trainer) == layers.TOKENS
    assert len(engine) > 8
    assert_bitwise_equal(trainer[: len(engine)], engine)


def test_shares_of_an_update_add_up(checkpoint: str, results: dict[str, Any]) -> None:
    whole = state_digest(
        (f"mlp.{name}", 2.0 * master.detach())
        for name, master in layers.bridged_block(checkpoint).named_parameters()
    )
    for form in range(2):
        receipts = [
            WeightReceipt.from_dict(results[f"engine{rank}"]["receipts"][form])
            for rank in range(layers.ENGINE_RANKS)
        ]
        assert [set(receipt.rows.values()) for receipt in receipts] == [{(0, 8)}, {(8, 16)}]
        for name, digest in whole.tensors.items():
            first, second = (receipt.digest.tensors[name] for receipt in receipts)
            assert (first if first == second else first + second) == digest, name
        assert receipts[0].digest != whole


def test_control_partial_sums_of_ranks_differ(checkpoint: str, results: dict[str, Any]) -> None:
    # What stock vLLM's reduce-scatter does: each rank sums its experts' results, then ranks add.
    block = layers.bridged_block(checkpoint)
    impl = block.experts._bridge.impl("experts")
    weights = [
        prepare_expert_weight(master, dtype=torch.bfloat16, impl=impl)
        for master in (block.experts.gate_up_proj, block.experts.down_proj)
    ]
    x = layers.tokens()
    with torch.no_grad():
        _, chosen, ids = block.gate(x)
    halves = [
        experts(x, *weights, torch.where((ids >= 8) == upper, ids, -1), chosen, impl=impl)
        for upper in (False, True)
    ]
    assert not bitwise_equal(halves[0] + halves[1], results["alone"])
