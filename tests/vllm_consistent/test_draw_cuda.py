"""The V1 runner's draw on CUDA: right distribution, one row's draw depends on that row alone."""

from __future__ import annotations

import pytest
import torch

from vllm_consistent.runner.draw_cuda import draw_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def seeds(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(1 << 62, (count,), device="cuda", generator=generator)


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return 3 * torch.randn(rows, vocab, device="cuda", generator=generator)


def test_draw_follows_the_distribution() -> None:
    logits = random_logits(1, 2500, seed=0)
    logits[0, 7] = -float("inf")
    count = 40_000
    temperature = torch.full((count,), 0.7, device="cuda")
    tokens = draw_tokens(logits.expand(count, -1), temperature, seeds(count, 1))
    probability = (logits[0].double() / 0.7).softmax(-1)
    seen = torch.bincount(tokens, minlength=2500).double() / count
    # A frequency of N draws deviates by sqrt(p / N); 6 sigma for all of 2,500 tokens at once.
    bound = 6 * (probability / count).sqrt() + 6 / count
    assert bool(((seen - probability).abs() <= bound).all())
    other = (logits[0].double() / 0.9).softmax(-1)
    assert not bool(((seen - other).abs() <= bound).all()), "control: another temperature is seen"


def test_draw_is_batch_invariant_and_follows_the_seed() -> None:
    logits, own = random_logits(33, 1500, seed=2), seeds(33, 3)
    temperature = torch.rand(33, device="cuda") + 0.2
    together = draw_tokens(logits, temperature, own)
    alone = [
        draw_tokens(logits[i : i + 1], temperature[i : i + 1], own[i : i + 1]) for i in range(33)
    ]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(draw_tokens(logits, temperature, seeds(33, 4)), together), "control"


def test_greedy_rows_take_their_largest_logit() -> None:
    logits = random_logits(6, 1500, seed=5)
    temperature = torch.tensor([0.0, 1.0] * 3, device="cuda")
    drawn = draw_tokens(logits, temperature, seeds(6, 6))
    assert torch.equal(drawn[::2], logits.argmax(-1)[::2])


def test_a_row_without_mass_gives_an_id_of_the_vocabulary() -> None:
    logits = torch.full((2, 1100), -float("inf"), device="cuda")
    logits[1] = float("nan")
    drawn = draw_tokens(logits, torch.ones(2, device="cuda"), seeds(2, 7))
    assert bool(((drawn >= 0) & (drawn < 1100)).all())
