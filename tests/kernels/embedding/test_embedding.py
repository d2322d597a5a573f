"""Relations of the token embedding: it moves rows and rounds nothing; its gradient is a sum."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.embedding import embedding, embedding_bwd
from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    flip_lowest_bit,
    hazard_activations,
)

VOCAB, HIDDEN = 1280, 192


def token_ids(tokens: int, device: str, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (tokens,), generator=generator).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embedding_moves_every_bit(impl_device: tuple[str, str], dtype: torch.dtype) -> None:
    impl, device = impl_device
    weight = hazard_activations((VOCAB, HIDDEN), seed=1, dtype=dtype, device=device)
    weight[7] = float("nan")
    weight[8] = -0.0
    ids = torch.cat((token_ids(300, device, seed=2), torch.tensor([7, 8, 0, VOCAB - 1]).to(device)))
    expected = torch.stack([weight[i] for i in ids.tolist()])
    assert_bitwise_equal(embedding(ids, weight, impl=impl), expected)
    assert_bitwise_equal(embedding(ids.int(), weight, impl=impl), expected)


def test_embedding_is_batch_invariant(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    weight = hazard_activations((VOCAB, HIDDEN), seed=3, device=device)
    ids = token_ids(257, device, seed=4)
    whole = embedding(ids, weight, impl=impl)
    for rows in BATCH_SIZES:
        part = slice(257 - rows, 257)
        assert_bitwise_equal(embedding(ids[part], weight, impl=impl), whole[part])


def test_control_one_flipped_bit_shows(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    weight = hazard_activations((VOCAB, HIDDEN), seed=5, device=device)
    ids = torch.arange(VOCAB, device=device)
    flipped = flip_lowest_bit(weight, (VOCAB - 1, HIDDEN - 1))
    assert not bitwise_equal(embedding(ids, flipped, impl=impl), embedding(ids, weight, impl=impl))


def test_embedding_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    weight = hazard_activations((VOCAB, HIDDEN), seed=6, device=device)
    ids = token_ids(17, device, seed=7)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(
        lambda i: embedding(i, weight, impl=impl), backend=backend, fullgraph=True
    )
    assert_bitwise_equal(compiled(ids), embedding(ids, weight, impl=impl))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embedding_grad_matches_reference(impl_device: tuple[str, str], dtype: torch.dtype) -> None:
    impl, device = impl_device
    ids = token_ids(300, device, seed=8)
    ids[::3] = 11
    grad_y = hazard_activations((300, HIDDEN), seed=9, dtype=dtype, device=device)
    grad = embedding_bwd(grad_y, ids, VOCAB, impl=impl)
    assert grad.dtype == torch.float32
    exact = torch.zeros((VOCAB, HIDDEN), dtype=torch.float64, device=device)
    magnitude = torch.zeros_like(exact)
    exact.index_add_(0, ids, grad_y.double())
    magnitude.index_add_(0, ids, grad_y.double().abs())
    # At most 101 fp32 additions an entry, each off by 2^-24 of the magnitude so far.
    assert bool(((grad - exact).abs() <= magnitude * 101 * 2**-24).all())


def test_embedding_grad_is_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    ids = token_ids(4096, device, seed=10) % 5
    grad_y = hazard_activations((4096, HIDDEN), seed=11, device=device)
    first = embedding_bwd(grad_y, ids, VOCAB, impl=impl)
    for _ in range(10):
        assert_bitwise_equal(embedding_bwd(grad_y, ids, VOCAB, impl=impl), first)


def test_embedding_grad_adds_tokens_in_order() -> None:
    ids = token_ids(257, "cpu", seed=12) % 7
    grad_y = hazard_activations((257, HIDDEN), seed=13)
    expected = torch.zeros((VOCAB, HIDDEN))
    for token, row in enumerate(ids.tolist()):
        expected[row] += grad_y[token].float()
    assert_bitwise_equal(embedding_bwd(grad_y, ids, VOCAB, impl="reference"), expected)
    backwards = embedding_bwd(grad_y.flip(0), ids.flip(0), VOCAB, impl="reference")
    assert not bitwise_equal(backwards, expected)


def test_embedding_rejects_bad_inputs() -> None:
    weight = torch.zeros(4, 8)
    ids = torch.arange(3)
    with pytest.raises(InvalidInputError, match="ids must be 1-D int32 or int64, got 2-D"):
        embedding(ids[None], weight, impl="reference")
    with pytest.raises(InvalidInputError, match="ids must be 1-D int32 or int64, got 1-D"):
        embedding(ids.float(), weight, impl="reference")
    with pytest.raises(InvalidInputError, match="weight must be a 2-D float tensor, got 2-D"):
        embedding(ids, weight.int(), impl="reference")
    with pytest.raises(IndexError):
        embedding(torch.tensor([4]), weight, impl="reference")
    with pytest.raises(InvalidInputError, match=r"grad_y must be of shape \(3, H\)"):
        embedding_bwd(torch.zeros(2, 8), ids, 4, impl="reference")
    with pytest.raises(UnsupportedError, match="impl 'gather' is not supported"):
        embedding(ids, weight, impl="gather")
    with pytest.raises(UnsupportedError, match="impl 'gather' is not supported"):
        embedding_bwd(torch.zeros(3, 8), ids, 4, impl="gather")
