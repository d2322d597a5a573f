"""Relations of silu(gate) * up: elements anywhere, halves of a fused tensor, against fp64."""

from __future__ import annotations

import pytest
import torch
from fresh_process import output_of_process

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.silu_and_mul import silu_and_mul, silu_and_mul_bwd
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    poisoned_rows,
)

WIDTHS = (1, 33, 320, 1536)


def inputs(
    rows: int, width: int, device: str, *, seed: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    fused = hazard_activations((rows, 2 * width), seed=seed, dtype=dtype, device=device)
    return fused[:, :width], fused[:, width:]


def silu_and_mul_fp64(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate.double()) * up.double()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_silu_and_mul_matches_reference(
    impl_device: tuple[str, str], width: int, dtype: torch.dtype
) -> None:
    impl, device = impl_device
    gate, up = inputs(65, width, device, seed=1, dtype=dtype)
    exact = silu_and_mul_fp64(gate, up)
    y = silu_and_mul(gate, up, impl=impl)
    # exp(-g) = 2^(-g log2 e): the rounded product is off by |g| 2^-24 units of the exponent, the
    # exponential itself by 2 ulp; then an addition, a division and a product of half an ulp each.
    # Where exp(-g) overflows (g < -88), the result is -0 instead of g 2^-128, |g| < 2^8; below
    # 2^-126 results are subnormal and may be flushed.
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-24
    relative = unit + (gate.double().abs() + 8) * 2**-23
    bound = exact.abs() * relative + up.double().abs() * 2**-120 + 2**-126
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_silu_and_mul_is_batch_invariant(
    impl_device: tuple[str, str], width: int, dtype: torch.dtype
) -> None:
    impl, device = impl_device
    gate, up = inputs(1100, width, device, seed=2, dtype=dtype)
    whole = silu_and_mul(gate, up, impl=impl)
    for rows in (*BATCH_SIZES, 1024):
        for start in {0, 5, 1100 - rows}:
            part = slice(start, start + rows)
            assert_bitwise_equal(silu_and_mul(gate[part], up[part], impl=impl), whole[part])


def test_silu_and_mul_is_elementwise(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    gate, up = inputs(3, 1003, device, seed=3, dtype=torch.float32)
    whole = silu_and_mul(gate, up, impl=impl)
    for start, width in ((0, 1), (1, 3), (2, 17), (5, 31), (7, 65), (500, 503)):
        part = slice(start, start + width)
        assert_bitwise_equal(silu_and_mul(gate[:, part], up[:, part], impl=impl), whole[:, part])


def test_control_stock_silu_follows_the_place() -> None:
    # ATen's fp32 silu ends its vector loop with another exp; a slice moves that end.
    gate, _ = inputs(64, 1003, "cpu", seed=4, dtype=torch.float32)
    gate = gate.contiguous()
    whole = torch.nn.functional.silu(gate)
    alone = torch.stack([torch.nn.functional.silu(row[:991].clone()) for row in gate])
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("ATen runs no vector loop on this CPU")
    assert not bitwise_equal(alone, whole[:, :991])


def test_silu_and_mul_fused_halves_equal_separate(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    gate, up = inputs(33, 320, device, seed=5)
    separate = silu_and_mul(gate.contiguous(), up.contiguous(), impl=impl)
    assert_bitwise_equal(silu_and_mul(gate, up, impl=impl), separate)


def test_control_rounding_before_the_product_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    gate, up = inputs(64, 320, device, seed=6)
    hugging_face_order = torch.nn.functional.silu(gate) * up
    assert not bitwise_equal(hugging_face_order, silu_and_mul(gate, up, impl=impl))


def test_silu_and_mul_ignores_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    gate, up = (half.contiguous() for half in inputs(9, 320, device, seed=7))
    expected = silu_and_mul(gate, up, impl=impl)
    gates, rows = poisoned_rows(gate, before=2, after=3)
    ups, _ = poisoned_rows(up, before=2, after=3)
    assert_bitwise_equal(silu_and_mul(gates, ups, impl=impl)[rows], expected)


def test_silu_and_mul_limits(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    gate = torch.tensor([[0.0, -0.0, 1e4, -1e4, float("inf")]], device=device)
    y = silu_and_mul(gate, torch.ones_like(gate), impl=impl)
    expected = torch.tensor([[0.0, -0.0, 1e4, -0.0, float("inf")]], device=device)
    assert_bitwise_equal(y, expected)


def test_silu_and_mul_is_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    gate, up = inputs(129, 1536, device, seed=8)
    first = silu_and_mul(gate, up, impl=impl)
    for _ in range(10):
        assert_bitwise_equal(silu_and_mul(gate, up, impl=impl), first)


def test_silu_and_mul_is_thread_and_process_invariant() -> None:
    source = """
from consistent_kernels import llvm
from consistent_kernels.silu_and_mul import silu_and_mul
from consistent_kernels.testing import hazard_activations

for dtype in (torch.bfloat16, torch.float32):
    gate = hazard_activations((701, 1003), seed=1, dtype=dtype)
    up = hazard_activations((701, 1003), seed=2, dtype=dtype)
    for impl in ("reference", "llvm") if llvm.is_available() else ("reference",):
        print_bits(silu_and_mul(gate, up, impl=impl))
"""
    one, two, five = (output_of_process(source, threads=threads) for threads in (1, 2, 5))
    assert one == two == five


def test_control_stock_silu_follows_the_threads() -> None:
    # A value whose silu differs between the vector loop and its end, in a tensor that one thread
    # covers without a remainder and five threads do not.
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("ATen runs no vector loop on this CPU")
    source = """
values = torch.randn(4096, generator=torch.Generator().manual_seed(1))
for value in values:
    many = torch.nn.functional.silu(value.expand(64).contiguous())[0]
    if torch.nn.functional.silu(value.view(1)) != many:
        break
print_bits(torch.nn.functional.silu(torch.full((1 << 20,), value.item())))
"""
    assert output_of_process(source, threads=1) != output_of_process(source, threads=5)


def test_silu_and_mul_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    gate, up = inputs(17, 320, device, seed=9)

    def twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(silu_and_mul(a, b, impl=impl), b, impl=impl)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(twice, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(gate, up), twice(gate, up))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_silu_and_mul_grad_matches_reference(
    impl_device: tuple[str, str], dtype: torch.dtype
) -> None:
    impl, device = impl_device
    gate, up = inputs(65, 320, device, seed=10, dtype=dtype)
    grad_y = hazard_activations((65, 320), seed=11, dtype=dtype, device=device)
    gate64, up64 = gate.double().requires_grad_(), up.double().requires_grad_()
    (silu_and_mul_fp64(gate64, up64) * grad_y.double()).sum().backward()
    grad_gate, grad_up = silu_and_mul_bwd(grad_y, gate, up, impl=impl)
    assert grad_gate.dtype == grad_up.dtype == dtype
    # As forward, with s = sigmoid. grad_gate cancels in 1 + g (1 - s) where g is near -1.28, and
    # 1 - s is off by 2^-23 where s is near 1: the error is bounded by the terms' magnitudes.
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-24
    slack = (gate.double().abs() + 16) * 2**-23
    size_up = up64.grad.abs()
    sigmoid = torch.sigmoid(gate.double())
    size_gate = (grad_y.double() * up.double()).abs() * sigmoid * (1 + gate.double().abs())
    floor = grad_y.double().abs() * (1 + up.double().abs()) * 2**-118 + 2**-126
    assert bool(((grad_up - up64.grad).abs() <= size_up * (unit + slack) + floor).all())
    allowed = gate64.grad.abs() * unit + size_gate * slack + floor
    assert bool(((grad_gate - gate64.grad).abs() <= allowed).all())


def test_silu_and_mul_rejects_bad_inputs() -> None:
    gate = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(InvalidInputError, match=r"up must be torch.bfloat16 of shape \(2, 8\)"):
        silu_and_mul(gate, gate[:, :7], impl="reference")
    with pytest.raises(InvalidInputError, match=r"up must be .*, got torch.float32"):
        silu_and_mul(gate, gate.float(), impl="reference")
    with pytest.raises(InvalidInputError, match=r"gate must be 2-D .*, got 2-D torch.int32"):
        silu_and_mul(gate.int(), gate.int(), impl="reference")
    with pytest.raises(InvalidInputError, match=r"gate must be 2-D .*, got 1-D"):
        silu_and_mul(gate[0], gate[0], impl="reference")
    with pytest.raises(UnsupportedError, match="impl 'aten' is not supported"):
        silu_and_mul(gate, gate, impl="aten")
