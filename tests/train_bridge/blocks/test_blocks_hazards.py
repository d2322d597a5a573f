"""What a block must not notice: ties, a broken neighbour, generous bounds, empty requests."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from block_cases import BLOCKS, PROGRAMS, BlockCase, chunked, prefill_then_decode

from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal
from train_bridge.blocks import PackedSequences

LENGTHS = [70, 3, 40]


@pytest.fixture(params=PROGRAMS)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=BLOCKS)
def case(request: pytest.FixtureRequest, device: str) -> BlockCase:
    return BlockCase.make(request.param, device)


def trained(case: BlockCase, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return case.trainer()(hidden, PackedSequences.from_lengths(lengths, case.device))


@pytest.mark.parametrize("name", ["v32", "v4-csa", "v32-fp8"])
def test_block_with_ties_everywhere_equals_train(name: str, device: str) -> None:
    """Head weights of zero: every score is a zero, of either sign, and the latest entries win."""
    case = BlockCase.make(name, device)
    # Of topk + 1 entries one is left out: 2,048 on CUDA, so that V3.2 needs a long request there.
    lengths = [70, 3, 40] if device == "cpu" else [2100, 3, 40]
    hidden = case.hidden(sum(lengths), seed=20)
    honest = trained(case, hidden, lengths)
    case.weights["index_weights"] = torch.zeros_like(case.weights["index_weights"])
    expected = trained(case, hidden, lengths)
    assert not bitwise_equal(expected, honest), "control: the selection matters"
    sequences = PackedSequences.from_lengths(lengths, device)
    steps = (2, 11, 16) if device == "cpu" else (700, 11, 16)
    for plan in (chunked(lengths, steps), prefill_then_decode(lengths, 3)):
        out = case.engine(lengths).run(hidden, sequences, plan)
        assert_bitwise_equal(out, expected)


def test_block_ignores_a_request_of_nan(case: BlockCase, device: str) -> None:
    """A broken request in the same steps and the same pack leaves its neighbours' bits alone."""
    hidden = case.hidden(sum(LENGTHS), seed=21)
    expected = trained(case, hidden, LENGTHS)
    broken = hidden.clone()
    first, last = 70, 73
    broken[first:last] = float("nan")
    rest = torch.ones(len(hidden), dtype=torch.bool, device=device)
    rest[first:last] = False
    packed = trained(case, broken, LENGTHS)
    assert_bitwise_equal(packed[rest], expected[rest])
    assert bool(packed[first:last].isnan().all()), "NaN must show"
    sequences = PackedSequences.from_lengths(LENGTHS, device)
    for plan in (chunked(LENGTHS, (2, 11, 16)), prefill_then_decode(LENGTHS, 3)):
        out = case.engine(LENGTHS).run(broken, sequences, plan, padding=2)
        assert_bitwise_equal(out[rest], expected[rest])
        assert bool(out[first:last].isnan().all())


def test_block_bounds_move_no_bit(case: BlockCase, device: str) -> None:
    """A step may allow longer contexts than it holds, as a captured graph does."""
    hidden = case.hidden(sum(LENGTHS), seed=22)
    expected = trained(case, hidden, LENGTHS)
    sequences = PackedSequences.from_lengths(LENGTHS, device)
    for bound in (max(LENGTHS) + 1, 600):
        engine = case.engine(LENGTHS, max_seq_len=bound)
        out = engine.run(hidden, sequences, prefill_then_decode(LENGTHS, 2))
        assert_bitwise_equal(out, expected, f"max_seq_len {bound}")


def test_block_takes_no_tokens(case: BlockCase, device: str) -> None:
    """Empty sequences beside others, a pack of none, a step of none."""
    lengths = [0, 9, 0, 5, 0]
    hidden = case.hidden(14, seed=23)
    expected = trained(case, hidden, [9, 5])
    assert_bitwise_equal(trained(case, hidden, lengths), expected)
    assert trained(case, hidden[:0], [0]).shape == (0, case.params.hidden)
    engine = case.engine([5])
    batch = engine.static_batch(3).batch
    empty = dataclasses.replace(
        batch, positions=batch.positions[:0], requests=batch.requests[:0], slots=batch.slots[:0]
    )
    with torch.no_grad():
        assert engine.block.forward(hidden[:0], empty).shape == (0, case.params.hidden)
