"""The random draw: right distribution, one row's draw depends on that row alone."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels import llvm
from vllm_consistent.runner.draw import draw_tokens, shared_partials


def test_draw_follows_the_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 2500, generator=generator)
    logits[0, 7] = -float("inf")
    count = 40_000
    uniform = torch.rand(count, dtype=torch.float64, generator=generator)
    tokens = torch.cat(
        [
            draw_tokens(logits.expand(500, -1), torch.full((500,), 0.7), part)
            for part in uniform.split(500)
        ]
    )
    probability = (logits[0].double() / 0.7).softmax(-1)
    seen = torch.bincount(tokens, minlength=2500).double() / count
    # A frequency of N draws deviates by sqrt(p / N); 6 sigma for all of 2,500 tokens at once.
    bound = 6 * (probability / count).sqrt() + 6 / count
    assert bool(((seen - probability).abs() <= bound).all())
    assert not bool((tokens == 7).any())


def test_draw_is_batch_invariant() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(33, 1500, generator=generator)
    uniform = torch.rand(33, dtype=torch.float64, generator=generator)
    temperature = torch.rand(33, generator=generator) + 0.2
    together = draw_tokens(logits, temperature, uniform)
    alone = [
        draw_tokens(logits[i : i + 1], temperature[i : i + 1], uniform[i : i + 1])
        for i in range(33)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_extreme_numbers_give_tokens_with_mass() -> None:
    logits = torch.full((2, 3000), -float("inf"))
    logits[:, 1023] = 0.0
    logits[:, 1024] = 0.0
    uniform = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert draw_tokens(logits, torch.ones(2), uniform).tolist() == [1023, 1024]
    one = torch.full((1, 3000), -float("inf"))
    one[0, 2999] = 5.0
    assert draw_tokens(one, torch.ones(1), uniform[1:]).tolist() == [2999]


def test_a_row_without_mass_gives_an_id_of_the_vocabulary() -> None:
    # The padding of the last tile is no token: an id of it would end the engine at the next step.
    logits = torch.full((2, 1100), -float("inf"))
    logits[1] = float("nan")
    drawn = draw_tokens(logits, torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64))
    assert bool(((drawn >= 0) & (drawn < 1100)).all())


@pytest.mark.skipif(
    not llvm.is_available(), reason="the sums are those of the compiled CPU kernels"
)
def test_draw_from_the_sums_of_the_score() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(20, 5000, generator=generator)
    uniform = torch.rand(20, dtype=torch.float64, generator=generator)
    temperature = torch.tensor([0.7, 1.0]).repeat(10)
    expected = draw_tokens(logits, temperature, uniform)
    shared = shared_partials(logits, temperature)
    assert torch.equal(draw_tokens(logits, temperature, uniform, shared), expected)
    other = shared_partials(-logits, temperature)
    assert not torch.equal(draw_tokens(logits, temperature, uniform, other), expected), "control"
