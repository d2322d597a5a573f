"""Norm and rotary kernels of the engine's list have the reference's bytes."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels import llvm

if not llvm.is_available():
    pytest.skip("needs an x86-64 CPU with AVX2, and llvmlite", allow_module_level=True)

from consistent_kernels.llvm.commands import run_one
from consistent_kernels.rms_norm import llvm as rms_norm
from consistent_kernels.rms_norm.reference import add_rms_norm_ref, rms_norm_ref
from consistent_kernels.rotary import llvm as rotary
from consistent_kernels.rotary.reference import rotary_ref
from consistent_kernels.testing import (
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    norm_weight,
)

SIZES = (32, 48, 80, 96, 128, 576, 896, 1536, 4096)
HEADS = (
    rotary.Heads(9, 3, 64, 32, False),
    rotary.Heads(16, 8, 128, 64, True),
    rotary.Heads(4, 2, 80, 40, False),
    rotary.Heads(2, 1, 96, 16, False),
    rotary.Heads(4, 1, 256, 128, True),
)


def normed(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x)
    run_one(*rms_norm.command(x, residual, weight, eps, out, None if residual is None else total))
    return out, total


@pytest.mark.parametrize("size", SIZES)
def test_norm_has_the_references_bits(size: int) -> None:
    assert rms_norm.has_reference_bits(size)
    x, residual = hazard_activations((33, size), seed=1), hazard_activations((33, size), seed=2)
    weight = norm_weight(size, seed=3)
    assert_bitwise_equal(normed(x, None, weight, 1e-6)[0], rms_norm_ref(x, weight, 1e-6))
    expected = add_rms_norm_ref(x, residual, weight, 1e-5)
    for ours, theirs in zip(normed(x, residual, weight, 1e-5), expected, strict=True):
        assert_bitwise_equal(ours, theirs)


def test_norm_keeps_nan_rows_apart_and_reads_strided_rows() -> None:
    x, weight = hazard_activations((5, 96), seed=4), norm_weight(96, seed=5)
    x[2, 7] = float("nan")
    wide = torch.full((5, 160), float("nan"), dtype=x.dtype)
    wide[:, :96] = x
    expected = rms_norm_ref(x, weight, 1e-5)
    out = torch.empty_like(x)
    run_one(*rms_norm.command(wide[:, :96], None, weight, 1e-5, out, None))
    others = [0, 1, 3, 4]
    assert_bitwise_equal(out[others], expected[others])
    # PyTorch writes a NaN one way in vectors and another way behind them.
    assert out[2].isnan().all()


def test_control_an_ascending_sum_of_squares_differs() -> None:
    x, weight = hazard_activations((4096, 576), seed=6), norm_weight(576, seed=8)
    squares = x.float().pow(2)
    ascending = torch.zeros(len(x), 1, dtype=torch.float32)
    for column in squares.split(1, dim=1):
        ascending += column
    y = x.float() * (ascending / 576 + 1e-5).rsqrt() * weight.float()
    assert not bitwise_equal(normed(x, None, weight, 1e-5)[0], y.bfloat16())


@pytest.mark.parametrize("heads", HEADS)
def test_rotary_has_the_references_bits(heads: rotary.Heads) -> None:
    assert rotary.has_reference_bits(heads)


def test_rotary_turns_a_position_outside_the_table_into_nan() -> None:
    heads = HEADS[0]
    qkv = hazard_activations((2, 15 * 64), seed=7)
    tables = torch.ones(4, 32), torch.zeros(4, 32)
    positions, slots = torch.tensor([3, 4]), torch.tensor([-1, -1])
    q = torch.empty(2, 9 * 64, dtype=torch.bfloat16)
    pages = torch.zeros(2, 16, 3, 64, dtype=torch.bfloat16)
    place = (pages[0], pages[1], 16, 16)
    run_one(*rotary.command(positions, tables, qkv, q, place, slots, heads, None))
    queries = qkv[:1].view(1, 15, 64)
    expected, _ = rotary_ref(positions[:1], queries[:, :9], queries[:, 9:12], *tables)
    assert_bitwise_equal(q[0], expected.flatten())
    assert q[1].isnan().all()
    assert not pages.any(), "slot -1 writes nothing"


@pytest.mark.parametrize("size", [17, 24, 16])
def test_sizes_that_are_no_vectors_are_left_to_the_reference(size: int) -> None:
    assert not rms_norm.has_reference_bits(size)
