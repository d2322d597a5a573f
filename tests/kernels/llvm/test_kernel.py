"""The building blocks of compiled kernels: exponential, trees, rounding, lists of calls."""

from __future__ import annotations

import pytest
import torch
from fresh_process import output_of_process

from consistent_kernels import llvm

if not llvm.is_available():
    pytest.skip("needs an x86-64 CPU with AVX2, and llvmlite", allow_module_level=True)

from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import LANES, Kernel, floats
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal


class _Map(Kernel):
    """out[i] = f(x[i]) for vectors of 16; words behind the counter: x, out, vectors."""

    def __init__(self, name: str, bits: int | None = None) -> None:
        super().__init__(name, bits)
        x, out, vectors = self.words(1, 3)
        with self.work(vectors) as unit:
            value = self.load(self.scaled(x, unit, 4 * LANES), floats(LANES), 4)
            self.store(getattr(self, name)(value), self.scaled(out, unit, 4 * LANES), 4)


def mapped(name: str, x: torch.Tensor, bits: int | None = None) -> torch.Tensor:
    out = torch.empty_like(x)
    vectors = x.numel() // LANES
    run_one(_Map(name, bits).compile(), (x.data_ptr(), out.data_ptr(), vectors), vectors)
    return out


def test_exp_is_within_two_units() -> None:
    x = torch.linspace(-103.0, 88.7, 1 << 16, dtype=torch.float64).float()
    exact = x.double().exp()
    # A unit of the last place: 2^-23 of the power of two below, 2^-149 for denormals.
    unit = torch.exp2(exact.log2().floor()).clamp_min(2.0**-126) * 2.0**-23
    assert float(((mapped("exp", x).double() - exact).abs() / unit).max()) <= 2


def test_exp_at_its_ends() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([-inf, inf, nan, 0.0, -0.0, -1e30, 1e30, -150.0] * 2, dtype=torch.float32)
    expected = torch.tensor([0.0, inf, nan, 1.0, 1.0, 0.0, inf, 0.0] * 2, dtype=torch.float32)
    assert_bitwise_equal(mapped("exp", x), expected)


def test_exp_does_not_follow_the_vectors() -> None:
    bits = torch.arange(0, 1 << 32, 8191, dtype=torch.int64)
    bits = bits[: bits.numel() // LANES * LANES]
    x = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    # A signaling NaN never comes out of arithmetic.
    x = torch.where(x.isnan(), float("nan"), x)
    assert_bitwise_equal(mapped("exp", x), mapped("exp", x, 256))


def test_rounding_is_pytorchs() -> None:
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64)
    bits = bits[: bits.numel() // LANES * LANES]
    x = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    assert_bitwise_equal(mapped("rounded", x).bfloat16(), x.bfloat16())


class _Sums(Kernel):
    """16 sums of 16 numbers: by `sums_of`, then one by one; words: x, out."""

    def __init__(self) -> None:
        super().__init__("sums")
        x, out = self.words(1, 2)
        with self.work(self.i64(1)):
            rows = [self.load(self.at(x, 64 * i), floats(LANES), 4) for i in range(LANES)]
            self.store(self.sums_of(rows), out, 4)
            for i, row in enumerate(rows):
                self.store(self.sum(row), self.at(out, 64 + 4 * i), 4)


def test_sums_side_by_side_are_halving_trees() -> None:
    x = torch.randn(LANES, LANES, generator=torch.Generator().manual_seed(1))
    x *= torch.exp2(torch.arange(LANES) % 9 - 4)
    out = torch.empty(2, LANES, dtype=torch.float32)
    run_one(_Sums().compile(), (x.data_ptr(), out.data_ptr()), 1)
    tree = x
    while tree.shape[1] > 1:
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    assert_bitwise_equal(out[0], tree[:, 0])
    assert_bitwise_equal(out[1], tree[:, 0])
    ascending = torch.stack([row.cumsum(0)[-1] for row in x])
    assert not bitwise_equal(out[0], ascending), "control: another order shows"


_SOURCE = """
from consistent_kernels.attention import AttentionParameters, attention_varlen
from consistent_kernels.linear import linear, prepare_weight
from consistent_kernels.silu_and_mul import silu_and_mul
from consistent_kernels.testing import hazard_activations

def inputs(shape, seed):
    return hazard_activations(shape, seed=seed).bfloat16()

x, master = inputs((53, 576), 1), inputs((1000, 576), 2)
y = linear(x, prepare_weight(master, dtype=x.dtype, impl="llvm"), impl="llvm")
print_bits(y, silu_and_mul(y[:, :500], y[:, 500:], impl="llvm"))
params = AttentionParameters(6, 2, 64, 0.125)
borders = torch.tensor([0, 1, 18, 90, 300])
q, k, v = inputs((300, 6, 64), 3), inputs((300, 2, 64), 4), inputs((300, 2, 64), 5)
for _ in range(5):
    print_bits(*attention_varlen(q, k, v, borders, borders, params=params, impl="llvm"))
"""


def test_lists_are_thread_and_process_invariant() -> None:
    one, two, five = (output_of_process(_SOURCE, threads=threads) for threads in (1, 2, 5))
    assert two == one, "1 and 2 threads differ"
    assert five == one, "1 and 5 threads differ"
