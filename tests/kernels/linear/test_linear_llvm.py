"""The compiled GEMM's layout: packed, transposed, unpacked; what it refuses."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels import llvm

if not llvm.is_available():
    pytest.skip("needs an x86-64 CPU with AVX2, and llvmlite", allow_module_level=True)

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.linear import linear, linear_packed, pack_weight, prepare_weight
from consistent_kernels.linear import llvm as gemm
from consistent_kernels.llvm.commands import run_one
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations

SHAPES = ((192, 576), (80, 200), (17, 33), (48, 2), (1, 1))


@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_layout_keeps_every_number(columns: int, inner: int) -> None:
    weight = hazard_activations((columns, inner), seed=1)
    packed = gemm.pack(weight)
    assert_bitwise_equal(gemm.unpack(packed, columns, inner), weight)
    assert torch.equal(gemm.pack_transposed(weight.t().contiguous()), packed)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_packed_equals_plain(columns: int, inner: int, out_dtype: torch.dtype) -> None:
    weight, x = (
        hazard_activations((columns, inner), seed=2),
        hazard_activations((37, inner), seed=3),
    )
    bias = hazard_activations((columns,), seed=4)
    packed = pack_weight(weight, impl="llvm")
    expected = linear(x, weight, bias, impl="llvm", out_dtype=out_dtype)
    for rows in (1, 7, 8, 9, 37):
        y = linear_packed(x[:rows], packed, bias, out_dtype=out_dtype)
        assert_bitwise_equal(y, expected[:rows])


def test_fetching_the_next_weight_moves_no_bit() -> None:
    x, weight = hazard_activations((37, 576), seed=7), hazard_activations((192, 576), seed=8)
    packed, smaller = gemm.pack(weight), gemm.pack(weight[:17, :64])
    bias = gemm.padded_bias(None, packed)
    expected = linear(x, weight, impl="llvm")
    operand = gemm.operand(x)  # a command holds its address alone
    for following in (None, packed, smaller):
        out = torch.full((37, packed.shape[0] * packed.shape[2]), float("nan")).bfloat16()
        run_one(*gemm.command(operand, packed, bias, out, following))
        assert_bitwise_equal(out[:, :192], expected)


def test_control_pairs_in_another_order_differ() -> None:
    x, weight = hazard_activations((37, 576), seed=5), hazard_activations((192, 576), seed=6)
    order = torch.arange(576).view(-1, 2).flip(0).flatten()
    moved = linear(x[:, order], weight[:, order].contiguous(), impl="llvm", out_dtype=torch.float32)
    assert not bitwise_equal(moved, linear(x, weight, impl="llvm", out_dtype=torch.float32))


def test_rejects_what_it_does_not_multiply() -> None:
    x = torch.zeros(2, 64, dtype=torch.float32)
    weight = prepare_weight(torch.zeros(8, 64), dtype=torch.float32, impl="llvm")
    with pytest.raises(UnsupportedError, match=r"linear \(llvm\): torch.float32"):
        linear(x, weight, impl="llvm")
    packed = pack_weight(weight.bfloat16(), impl="llvm")
    with pytest.raises(InvalidInputError, match="out_dtype"):
        linear_packed(x.bfloat16(), packed, out_dtype=torch.float16)
