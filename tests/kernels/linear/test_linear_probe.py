"""The start-up probe accepts row counts that move no bit, and only those."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.linear import linear
from consistent_kernels.linear.probe import probe_inputs, rows_per_call, witness
from consistent_kernels.linear.schedule import TILE_ROWS
from consistent_kernels.linear.tiles import linear_by_calls, multiply_fp32, row_calls
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations


def _ascending(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((x.shape[0], weight.shape[0]))
    for k in range(x.shape[1]):
        total = total + x[:, k, None].float() * weight[:, k].float()
    return total


def ascending_tile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """One order of additions, whatever the number of rows."""
    out.copy_(_ascending(x, weight))


def split_tile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """A library that splits K in two when it sees 64 rows or more, as GEMMs do at other sizes."""
    parts = 2 if x.shape[0] >= 64 else 1
    pieces = zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
    out.copy_(sum(_ascending(*piece) for piece in pieces))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_accepts_equal_bits(dtype: torch.dtype) -> None:
    assert rows_per_call(ascending_tile, 16, 48, dtype) == (4, TILE_ROWS, 64, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_refuses_another_order(dtype: torch.dtype) -> None:
    assert rows_per_call(split_tile, 16, 48, dtype) == (4, TILE_ROWS)


def first_product_tile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """A library that starts a sum at its first product, and at +0 where it sees fewer rows."""
    total = x[:, :1] * weight[:, 0] if x.shape[0] >= 64 else _ascending(x[:, :1], weight[:, :1])
    for k in range(1, x.shape[1]):
        total = total + x[:, k, None] * weight[:, k]
    out.copy_(total)


@pytest.mark.parametrize("inner", [1, 3])
def test_probe_sees_signs_of_zeros(inner: int) -> None:
    assert rows_per_call(ascending_tile, 16, inner, torch.float32) == (4, TILE_ROWS, 64, 256)
    sizes = rows_per_call(first_product_tile, 16, inner, torch.float32)
    assert sizes == ((4, TILE_ROWS) if inner == 1 else (4, TILE_ROWS, 64, 256))


def test_probe_inputs_cancel_exactly() -> None:
    x, weight = probe_inputs(8, 24, 576, torch.bfloat16)
    assert bool(((x.double() @ weight.double().t()) == 0).all())
    product = x.float() @ weight.float().t()
    assert (product != 0).float().mean() > 0.5, "the additions' errors must be visible"


def test_probe_is_deterministic_and_leaves_the_generator_alone() -> None:
    state = torch.random.get_rng_state()
    first = probe_inputs(16, 64, 96, torch.float32)
    answers = {rows_per_call.__wrapped__(multiply_fp32, 64, 96, torch.float32) for _ in range(3)}
    assert len(answers) == 1
    for again, before in zip(probe_inputs(16, 64, 96, torch.float32), first, strict=True):
        assert_bitwise_equal(again, before)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("sizes", [(16,), (4, 16), (4, 16, 64, 256), (16, 256)])
def test_row_calls_cover_every_row_once(sizes: tuple[int, ...]) -> None:
    for rows in range(600):
        end = 0
        for start, size in row_calls(rows, sizes):
            assert start == end
            assert size in sizes
            end = start + size
        assert rows <= end < rows + TILE_ROWS


def test_linear_by_calls_ignores_the_sizes_where_the_probe_agrees() -> None:
    x = hazard_activations((300, 192), seed=1)
    weight = hazard_activations((128, 192), seed=2, dtype=torch.float32)
    allowed = rows_per_call(multiply_fp32, 128, 192, torch.float32)
    tiles = [
        linear_by_calls(x, weight, None, torch.float32, sizes=sizes, multiply=multiply_fp32)
        for sizes in ((TILE_ROWS,), allowed)
    ]
    assert_bitwise_equal(tiles[1], tiles[0])


def test_control_sizes_that_the_probe_refuses_differ() -> None:
    x = hazard_activations((64, 192), seed=1)
    weight = hazard_activations((128, 192), seed=2, dtype=torch.float32)
    by_16, by_64 = (
        linear_by_calls(x, weight, None, torch.float32, sizes=sizes, multiply=split_tile)
        for sizes in ((16,), (16, 64))
    )
    assert not bitwise_equal(by_64, by_16)


def test_witness_sees_another_order() -> None:
    def split_always(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        # Every third product: MKL cuts K in two itself on some CPUs.
        out.copy_(sum(_ascending(x[:, k::3], weight[:, k::3]) for k in range(3)))

    assert witness(multiply_fp32, torch.float32) == witness(multiply_fp32, torch.float32)
    assert witness(split_always, torch.float32) != witness(multiply_fp32, torch.float32)


def test_linear_of_one_column_keeps_the_signs_of_zeros() -> None:
    """One product a result: MKL's small calls gave +0 where its large ones gave -0."""
    x = torch.zeros(130, 1, dtype=torch.float32)
    x[::2] = -0.0
    weight = probe_inputs(1, 70, 1, torch.float32)[1]
    whole = linear(x, weight, impl="reference")
    for rows in (1, 2, 16, 17, 64, 129):
        assert_bitwise_equal(linear(x[:rows], weight, impl="reference"), whole[:rows])
