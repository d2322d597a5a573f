"""The blocks in other processes, with other numbers of threads: the same bytes (R1)."""

from __future__ import annotations

import pytest
from fresh_process import output_of_process

NAMES = ("v32", "v4-csa-fp8")
SOURCE = """
from block_cases import BlockCase, prefill_then_decode
from train_bridge.blocks import PackedSequences

for name in {names!r}:
    case = BlockCase.make(name, "cpu")
    lengths = [3, 27]
    hidden = case.hidden(sum(lengths), seed={seed})
    sequences = PackedSequences.from_lengths(lengths)
    with torch.no_grad():
        print_bits(case.trainer()(hidden, sequences))
    print_bits(case.engine(lengths).run(hidden, sequences, prefill_then_decode(lengths, 2)))
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    return output_of_process(SOURCE.format(names=NAMES, seed=0), threads=1).split()


def test_blocks_are_stable_across_processes(printed: list[str]) -> None:
    assert len(printed) == 2 * len(NAMES)
    assert printed[::2] == printed[1::2]
    again = output_of_process(SOURCE.format(names=NAMES, seed=0), threads=3).split()
    assert again == printed


def test_control_another_input_prints_other_bits(printed: list[str]) -> None:
    other = output_of_process(SOURCE.format(names=NAMES[:1], seed=1), threads=1).split()
    assert set(other).isdisjoint(printed)
