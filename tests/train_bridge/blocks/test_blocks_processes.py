"""The blocks in other processes, with other numbers of threads: the same bytes (R1)."""

from __future__ import annotations

import pytest
from block_cases import BLOCKS
from fresh_process import output_of_process

SOURCE = """
from block_cases import BlockCase, prefill_then_decode
from train_bridge.blocks import PackedSequences

for name in {names!r}:
    case = BlockCase.make(name, "cpu")
    lengths = [3, 37]
    hidden = case.hidden(sum(lengths))
    sequences = PackedSequences.from_lengths(lengths)
    with torch.no_grad():
        print_bits(case.trainer()(hidden, sequences))
    print_bits(case.engine(lengths).run(hidden, sequences, prefill_then_decode(lengths, 2)))
"""


def test_blocks_are_stable_across_processes() -> None:
    source = SOURCE.format(names=list(BLOCKS))
    first = output_of_process(source, threads=1)
    lines = first.split()
    assert len(lines) == 2 * len(BLOCKS)
    assert lines[::2] == lines[1::2]
    assert output_of_process(source, threads=3) == first


def test_control_another_input_prints_other_bits() -> None:
    source = SOURCE.format(names=["v4-window"])
    other = source.replace("case.hidden(sum(lengths))", "case.hidden(sum(lengths), seed=1)")
    assert other != source
    with pytest.raises(AssertionError):
        assert output_of_process(other, threads=1) == output_of_process(source, threads=1)
