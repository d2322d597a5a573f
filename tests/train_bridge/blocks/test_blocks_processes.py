"""Blocks and hyper-connections in other processes, with other threads: the same bytes (R1)."""

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

from consistent_kernels.hyper_connections import hc_head, hc_post, hc_pre
from consistent_kernels.testing import hazard_activations

generator = torch.Generator().manual_seed({seed})
draw = lambda *shape: torch.randn(shape, generator=generator)
x = hazard_activations((33, 4, 96), seed={seed})
numbers = {{"norm_eps": 1e-6, "eps": 1e-6, "impl": "reference"}}
for _ in range(2):
    generator.manual_seed({seed})
    y, post, comb = hc_pre(x, draw(24, 384) * 0.05, draw(3), draw(24), iterations=20, **numbers)
    print_bits(torch.cat((
        y.float().flatten(), post.flatten(), comb.flatten(),
        hc_post(y, x, post, comb, impl="reference").float().flatten(),
        hc_head(x, draw(4, 384) * 0.05, draw(1), draw(4), **numbers).float().flatten(),
    )))
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    return output_of_process(SOURCE.format(names=NAMES, seed=0), threads=1).split()


def test_blocks_are_stable_across_processes(printed: list[str]) -> None:
    assert len(printed) == 2 * len(NAMES) + 2
    assert printed[::2] == printed[1::2]
    again = output_of_process(SOURCE.format(names=NAMES, seed=0), threads=3).split()
    assert again == printed


def test_control_another_input_prints_other_bits(printed: list[str]) -> None:
    other = output_of_process(SOURCE.format(names=NAMES[:1], seed=1), threads=1).split()
    assert set(other).isdisjoint(printed)
