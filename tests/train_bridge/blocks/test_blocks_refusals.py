"""What the blocks of either side refuse: numbers, weights and batches that they cannot serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_cases import BlockCase

from consistent_kernels.blocks import PagedBatch
from consistent_kernels.errors import ConsistencyError, InvalidInputError
from train_bridge.blocks import PackedSequences

NAMES = ("v32", "v4-csa")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("v32", {"topk": 0}),
        ("v32", {"topk": 2049}),
        ("v32", {"topk": 4.5}),
        ("v32", {"heads": 2.0}),
        ("v32", {"heads": 0}),
        ("v32", {"index_heads": 0}),
        ("v32", {"nope_dim": 0}),
        ("v4-csa", {"topk": 0}),
        ("v4-csa", {"window": 0}),
        ("v4-csa", {"groups": 3}),
        ("v4-csa", {"groups": 0}),
        ("v4-csa", {"out_rank": -1}),
    ],
)
def test_block_parameters_reject_numbers(name: str, change: dict[str, int]) -> None:
    params = BlockCase.make(name, "cpu").params
    (key,) = change
    with pytest.raises(InvalidInputError, match=rf"Parameters: {key} must be .* got {change[key]}"):
        dataclasses.replace(params, **change)


@pytest.mark.parametrize(
    ("name", "change"),
    [("v32", {"rotary_dim": 32}), ("v4-csa", {"rotary_dim": 32}), ("v32", {"head_dim": 128})],
)
def test_block_parameters_reject_another_rotation(name: str, change: dict[str, int]) -> None:
    params = BlockCase.make(name, "cpu").params
    (key,) = change
    with pytest.raises(InvalidInputError, match=rf"rope.{key} must be 64, got {change[key]}"):
        dataclasses.replace(params, rope=dataclasses.replace(params.rope, **change))


@pytest.mark.parametrize("name", NAMES)
def test_block_trainer_rejects_weights(name: str) -> None:
    case = BlockCase.make(name, "cpu")
    kind = type(case.trainer())

    def make(**change: torch.Tensor | None) -> None:
        weights = {
            key: value for key, value in (case.weights | change).items() if value is not None
        }
        kind(case.params, weights, programs=case.programs)

    make()
    short = case.weights["q_a"][:5]
    with pytest.raises(InvalidInputError, match=r"weight 'q_a' must be .* got absent"):
        make(q_a=None)
    with pytest.raises(InvalidInputError, match=r"weight 'q_a' must be .* got \(5, 64\)"):
        make(q_a=short)
    with pytest.raises(InvalidInputError, match="weight 'other' must be absent"):
        make(other=short)


@pytest.mark.parametrize("name", NAMES)
def test_block_engine_rejects_batches(name: str) -> None:
    case = BlockCase.make(name, "cpu")
    engine = case.engine([5, 3])
    hidden = case.hidden(3)

    place = torch.arange(3)

    def run(hidden: torch.Tensor = hidden, **change: Any) -> torch.Tensor:
        zeros = torch.zeros(3, dtype=torch.int32)
        batch = PagedBatch(place, zeros, place, engine.table, 16, 5)
        return engine.block.forward(hidden, dataclasses.replace(batch, **change))

    run()
    table = engine.table
    bad: dict[str, Callable[[], Any]] = {
        "block_size must be 16, .* got 32": lambda: run(block_size=32),
        "block_size must be 16, .* got 0": lambda: run(block_size=0),
        "max_seq_len must be at least 1, got 0": lambda: run(max_seq_len=0),
        r"positions\[0\] must be from 0 to 4, got 5": lambda: run(positions=place + 5),
        "block_table must be 2-D int32, got torch.int32": lambda: run(block_table=table[0]),
        "block_table must be 2-D int32, got torch.int64": lambda: run(block_table=table.long()),
        "hidden must be .* got torch.float32": lambda: run(hidden.float()),
        r"hidden must be .* got torch.bfloat16 of shape \(3, 32\)": lambda: run(hidden[:, :32]),
        r"hidden must be .* got torch.bfloat16 of shape \(1, 3, 64\)": lambda: run(hidden[None]),
    }
    for message, call in bad.items():
        with pytest.raises(InvalidInputError, match=rf"Paged\w+Attention: {message}"):
            call()


@pytest.mark.parametrize("name", NAMES)
def test_block_trainer_rejects_batches(name: str) -> None:
    case = BlockCase.make(name, "cpu")
    block, sequences = case.trainer(), PackedSequences.from_lengths([5, 3])
    hidden = case.hidden(9)
    block(hidden[:8], sequences)
    for given in (hidden, hidden[:7], hidden[:8].float(), hidden[:8, :32], hidden[None, :8]):
        with pytest.raises(InvalidInputError, match=r"Packed\w+Attention: hidden must be .*8, 64"):
            block(given, sequences)


@pytest.mark.parametrize("name", NAMES)
def test_block_trainer_rejects_masters_that_were_cast(name: str) -> None:
    case = BlockCase.make(name, "cpu")
    block, sequences = case.trainer().half(), PackedSequences.from_lengths([5])
    with pytest.raises(
        InvalidInputError, match=r"weight '\w+' must be float32 or bfloat16, got tor"
    ):
        block(case.hidden(5), sequences)


@pytest.mark.parametrize("name", NAMES)
def test_block_engine_rejects_sizes(name: str) -> None:
    case = BlockCase.make(name, "cpu")
    kind = type(case.engine([3]).block)
    sizes = {"blocks": 4, "max_seq_len": 8, "block_size": 16}
    for key in sizes:
        with pytest.raises(ConsistencyError, match=f"{key}.* must be .* got "):
            kind(case.params, case.weights, programs=case.programs, **(sizes | {key: 0}))
    most = case.params.rope.max_position
    with pytest.raises(InvalidInputError, match=f"max_seq_len must be at most .* {most}, got"):
        kind(case.params, case.weights, programs=case.programs, blocks=4, max_seq_len=most + 1)


def test_sequences_reject_negative_lengths() -> None:
    with pytest.raises(InvalidInputError, match="PackedSequences: lengths must be at least 0"):
        PackedSequences.from_lengths([5, -3])
    assert PackedSequences.from_lengths([]).positions.shape == (0,)
