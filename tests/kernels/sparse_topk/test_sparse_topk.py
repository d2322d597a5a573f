"""Relations of the sparse top-k: one total order, rows alone and together, offsets, poison."""

from __future__ import annotations

import pytest
import torch
from implementations import NVRTC_CUDA, REFERENCE_CPU, TRITON_CUDA
from topk_cases import borders, hazard_scores, plain_topk

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.sparse_topk import sparse_topk, sparse_topk_tickets
from consistent_kernels.sparse_topk.reference import ordered_bits
from consistent_kernels.testing import BATCH_SIZES, assert_bitwise_equal, bitwise_equal

NAN = float("nan")


@pytest.fixture(params=[REFERENCE_CPU, TRITON_CUDA, NVRTC_CUDA])
def impl_device(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(implementation, device) pairs of this op."""
    return request.param


def select(
    scores: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, k: int, impl: str
) -> torch.Tensor:
    return sparse_topk(scores, starts, ends, k, impl=impl)


@pytest.mark.parametrize("k", [1, 512, 1500, 2048])
@pytest.mark.parametrize("columns", [1, 2049, 9001, 40000])
def test_sparse_topk_matches_reference(impl_device: tuple[str, str], columns: int, k: int) -> None:
    impl, device = impl_device
    scores = hazard_scores(3, columns, seed=columns + k, device=device)
    pairs = [(0, columns), (columns // 3, columns), (columns // 5, columns - columns // 7)]
    got = select(scores, *borders(*pairs, device=device), k, impl)
    assert got.dtype == torch.int32
    for row, (start, end) in enumerate(pairs):
        assert got[row].tolist() == plain_topk(scores[row].cpu(), start, end, k)


def test_sparse_topk_key_is_a_total_order() -> None:
    # The classes of the spec, ascending; each class is one value, the next is above it.
    classes = [
        [NAN, -NAN],
        [float("-inf")],
        [torch.finfo(torch.float32).min],
        [-1.5],
        [-1e-45],
        [-0.0, 0.0],
        [1e-45],
        [1.5],
        [float("inf")],
    ]
    last = -(1 << 31)
    for values in classes:
        keys = set(ordered_bits(torch.tensor(values)).tolist())
        assert len(keys) == 1
        (key,) = keys
        assert key > last
        last = key


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, NAN, float("-inf")])
def test_sparse_topk_larger_position_wins_ties(impl_device: tuple[str, str], value: float) -> None:
    impl, device = impl_device
    scores = torch.full((2, 20000), value, device=device)
    got = select(scores, *borders((0, 20000), (5, 9000), device=device), 2048, impl)
    assert got[0].tolist() == list(range(19999, 19999 - 2048, -1))
    assert got[1].tolist() == list(range(8994, 8994 - 2048, -1))


def test_sparse_topk_short_rows_return_all(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    scores = torch.full((4, 3000), NAN, device=device)
    got = select(
        scores, *borders((0, 0), (7, 8), (100, 2148), (3000, 3000), device=device), 2048, impl
    )
    assert got[0].tolist() == [-1] * 2048
    assert got[1].tolist() == [0] + [-1] * 2047
    assert got[2].tolist() == list(range(2047, -1, -1))
    assert got[3].tolist() == [-1] * 2048


def test_sparse_topk_is_batch_invariant(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    scores = hazard_scores(257, 2500, seed=1, device=device)
    ends = torch.arange(257, dtype=torch.int32, device=device) * 9 + 100
    starts = torch.zeros_like(ends)
    whole = select(scores, starts, ends, 512, impl)
    for rows in BATCH_SIZES:
        for first in {0, (257 - rows) // 2, 257 - rows}:
            part = slice(first, first + rows)
            got = select(scores[part], starts[part], ends[part], 512, impl)
            assert_bitwise_equal(got, whole[part])


@pytest.mark.parametrize("columns", [3000, 30000])
def test_sparse_topk_prefill_equals_decode(impl_device: tuple[str, str], columns: int) -> None:
    # Prefill: the requests' keys side by side in one row; decode: each from column 0.
    impl, device = impl_device
    alone = hazard_scores(1, columns, seed=2, device=device)
    for offset in (1, 16, 77, 1000):
        packed = torch.full((1, columns + offset + 40), NAN, device=device)
        packed[:, offset : offset + columns] = alone
        got = select(packed, *borders((offset, offset + columns), device=device), 2048, impl)
        expected = select(alone, *borders((0, columns), device=device), 2048, impl)
        assert_bitwise_equal(got, expected, f"offset {offset}")


def test_sparse_topk_ignores_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    clean = hazard_scores(5, 12000, seed=3, device=device)
    pairs = [(0, 11999), (5, 3000), (17, 12000), (4000, 6100), (1, 2)]
    bounds = borders(*pairs, device=device)
    expected = select(clean, *bounds, 2048, impl)
    for poison in (NAN, float("inf")):
        buffer = torch.full((5, 12080), poison, device=device)
        for row, (start, end) in enumerate(pairs):
            buffer[row, start:end] = clean[row, start:end]
        assert_bitwise_equal(select(buffer[:, :12000], *bounds, 2048, impl), expected)


def test_sparse_topk_is_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    scores = hazard_scores(4, 33000, seed=4, device=device)
    bounds = borders((0, 33000), (1, 32000), (0, 9000), (0, 100), device=device)
    first = select(scores, *bounds, 2048, impl)
    for _ in range(10):
        assert_bitwise_equal(select(scores, *bounds, 2048, impl), first)


@pytest.mark.parametrize("with_tickets", [True, False])
def test_sparse_topk_compiled_equals_eager(
    impl_device: tuple[str, str], with_tickets: bool
) -> None:
    impl, device = impl_device
    scores = hazard_scores(4, 9000, seed=8, device=device)
    bounds = borders((0, 9000), (1, 8000), (0, 100), (7, 7), device=device)
    tickets = sparse_topk_tickets(4, device) if with_tickets else None

    def call(values: torch.Tensor) -> torch.Tensor:
        return sparse_topk(values, *bounds, 512, impl=impl, tickets=tickets)

    compiled = torch.compile(call, backend="inductor", fullgraph=True)
    assert_bitwise_equal(compiled(scores), call(scores))


def test_control_batch_offset_in_the_key_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    scores = hazard_scores(1, 3000, seed=5, device=device)
    got = select(scores, *borders((500, 3000), device=device), 64, impl)
    with_offset = select(scores, *borders((0, 3000), device=device), 64, impl)
    assert not bitwise_equal(got, with_offset)


def test_control_signed_zeros_apart_differ() -> None:
    scores = hazard_scores(1, 3000, seed=6)
    scores[scores > 0] = 0.0
    got = select(scores, *borders((0, 3000)), 600, "reference")[0]
    # Integers of the raw bits: -0.0 below +0.0.
    bits = scores[0].view(torch.int32).to(torch.int64)
    raw = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) * (1 << 32) + torch.arange(3000)
    apart = raw.topk(600).indices.sort(descending=True).values.to(torch.int32)
    assert not bitwise_equal(got, apart)


def test_control_smaller_position_on_ties_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    scores = torch.round(hazard_scores(1, 3000, seed=7, device=device) * 4) / 4
    scores[scores.isnan()] = -9.0
    got = select(scores, *borders((0, 3000), device=device), 600, impl)[0]
    mirrored = 2999 - select(scores.flip(1), *borders((0, 3000), device=device), 600, impl)[0]
    assert not bitwise_equal(got, mirrored.flip(0))


def test_sparse_topk_rejects_bad_inputs() -> None:
    scores = torch.zeros(2, 8)
    bounds = borders((0, 8), (0, 8))
    with pytest.raises(InvalidInputError, match="scores must be 2-D float32, got 2-D"):
        sparse_topk(scores.half(), *bounds, 4, impl="reference")
    with pytest.raises(InvalidInputError, match="k must be an integer from 1 to 2048, got 4096"):
        sparse_topk(scores, *bounds, 4096, impl="reference")
    with pytest.raises(InvalidInputError, match=r"ends must be int32 or int64 of shape \(2,\)"):
        sparse_topk(scores, bounds[0], bounds[1][:1], 4, impl="reference")
    with pytest.raises(InvalidInputError, match="unit column stride"):
        sparse_topk(scores.t().contiguous().t(), *bounds, 4, impl="reference")
    with pytest.raises(InvalidInputError, match="tickets must be int32 with at least 2 rows"):
        sparse_topk(
            scores, *bounds, 4, impl="reference", tickets=sparse_topk_tickets(1, scores.device)
        )
    with pytest.raises(InvalidInputError, match="start <= end <= 8, got 0, 9 in row 1"):
        sparse_topk(scores, *borders((0, 8), (0, 9)), 4, impl="reference")
    with pytest.raises(UnsupportedError, match="supported: reference, triton, cuda"):
        sparse_topk(scores, *bounds, 4, impl="flash_mla")
