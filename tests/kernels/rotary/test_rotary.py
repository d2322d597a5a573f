"""Relations of rotary: tokens alone and together, heads fused and separate, against fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fresh_process import output_of_process

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.rotary import RopeParameters, rope_tables, rotary, rotary_bwd
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    poisoned_rows,
)

ROPES = {
    "head_64": RopeParameters(64, 64, 1e5, 8192),
    "head_128": RopeParameters(128, 128, 1e6, 4096),
    "partial": RopeParameters(96, 48, 1e4, 2048),
}


@pytest.fixture(params=list(ROPES))
def rope(request: pytest.FixtureRequest) -> RopeParameters:
    return ROPES[request.param]


def inputs(
    tokens: int,
    rope: RopeParameters,
    device: str,
    *,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions in no order, q of 3 heads and k of 1 as views of one fused qkv row."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(rope.max_position, (tokens,), generator=generator).to(device)
    qkv = hazard_activations((tokens, 5, rope.head_dim), seed=seed, dtype=dtype, device=device)
    return positions, qkv[:, :3], qkv[:, 3:4]


def rotate_fp64(
    positions: torch.Tensor, x: torch.Tensor, rope: RopeParameters, sign: float = 1.0
) -> torch.Tensor:
    """The spec in fp64, with the fp32 angle that it pins."""
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    inv_freq = (rope.theta**-exponent).float().to(x.device)
    angle = (positions.float()[:, None] * inv_freq).double()[:, None]
    cos, sin = angle.cos(), sign * angle.sin()
    half = rope.rotary_dim // 2
    x1, x2, rest = x.double().split((half, half, rope.head_dim - 2 * half), dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)


def rotation_bound(exact: torch.Tensor, x: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
    # Two table entries, two products and an addition, each half an ulp of at most the pair's
    # largest magnitude times two; then one rounding; subnormal results may be flushed.
    unit = 2**-8 if x.dtype == torch.bfloat16 else 2**-24
    half = rope.rotary_dim // 2
    pair = x.double().abs()
    pair[..., : 2 * half] = (pair[..., :half] + pair[..., half : 2 * half]).repeat(1, 1, 2)
    return exact.abs() * unit + pair * 5 * 2**-24 * (1 + unit) + 2**-126


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotary_matches_reference(
    impl_device: tuple[str, str], rope: RopeParameters, dtype: torch.dtype
) -> None:
    impl, device = impl_device
    positions, q, k = inputs(65, rope, device, seed=1, dtype=dtype)
    for actual, x in zip(rotary(positions, q, k, rope=rope, impl=impl), (q, k), strict=True):
        exact = rotate_fp64(positions, x, rope)
        assert actual.dtype == dtype
        assert actual.is_contiguous()
        assert bool(((actual.double() - exact).abs() <= rotation_bound(exact, x, rope)).all())


def test_rotary_is_batch_invariant(impl_device: tuple[str, str], rope: RopeParameters) -> None:
    impl, device = impl_device
    positions, q, k = inputs(1100, rope, device, seed=2)
    whole_q, whole_k = rotary(positions, q, k, rope=rope, impl=impl)
    for rows in (*BATCH_SIZES, 1024):
        for start in {0, 5, 1100 - rows}:
            part = slice(start, start + rows)
            q_part, k_part = rotary(positions[part], q[part], k[part], rope=rope, impl=impl)
            assert_bitwise_equal(q_part, whole_q[part])
            assert_bitwise_equal(k_part, whole_k[part])


def test_rotary_position_zero_is_identity(
    impl_device: tuple[str, str], rope: RopeParameters
) -> None:
    impl, device = impl_device
    _, q, k = inputs(9, rope, device, seed=3)
    zeros = torch.zeros(9, dtype=torch.int64, device=device)
    q_out, k_out = rotary(zeros, q, k, rope=rope, impl=impl)
    # x * 1 - y * 0: the sign of a zero may change, nothing else.
    assert torch.equal(q_out, q)
    assert torch.equal(k_out, k)


def test_rotary_fused_heads_equal_separate(
    impl_device: tuple[str, str], rope: RopeParameters
) -> None:
    impl, device = impl_device
    positions, q, k = inputs(17, rope, device, seed=4)
    fused_q, fused_k = rotary(positions, q, k, rope=rope, impl=impl)
    for head in range(3):
        alone, _ = rotary(positions, q[:, head : head + 1].contiguous(), k, rope=rope, impl=impl)
        assert_bitwise_equal(alone, fused_q[:, head : head + 1])
    swapped, _ = rotary(positions, k, q, rope=rope, impl=impl)
    assert_bitwise_equal(swapped, fused_k)


def test_rotary_takes_int32_positions(impl_device: tuple[str, str], rope: RopeParameters) -> None:
    impl, device = impl_device
    positions, q, k = inputs(17, rope, device, seed=5)
    expected = rotary(positions, q, k, rope=rope, impl=impl)
    actual = rotary(positions.int(), q, k, rope=rope, impl=impl)
    for a, b in zip(actual, expected, strict=True):
        assert_bitwise_equal(a, b)


def test_rotary_ignores_poison(impl_device: tuple[str, str], rope: RopeParameters) -> None:
    impl, device = impl_device
    positions, q, k = inputs(9, rope, device, seed=6)
    expected_q, expected_k = rotary(positions, q, k, rope=rope, impl=impl)
    q_buffer, rows = poisoned_rows(q, before=2, after=3)
    k_buffer, _ = poisoned_rows(k, before=2, after=3)
    padded = torch.zeros(14, dtype=positions.dtype, device=device)
    padded[rows] = positions
    q_out, k_out = rotary(padded, q_buffer, k_buffer, rope=rope, impl=impl)
    assert_bitwise_equal(q_out[rows], expected_q)
    assert_bitwise_equal(k_out[rows], expected_k)


def test_rotary_is_run_to_run_stable(impl_device: tuple[str, str], rope: RopeParameters) -> None:
    impl, device = impl_device
    positions, q, k = inputs(129, rope, device, seed=7)
    first, _ = rotary(positions, q, k, rope=rope, impl=impl)
    for _ in range(10):
        again, _ = rotary(positions, q, k, rope=rope, impl=impl)
        assert_bitwise_equal(again, first)


def test_rotary_is_thread_and_process_invariant() -> None:
    source = """
from consistent_kernels.rotary import RopeParameters, rope_tables, rotary
from consistent_kernels.testing import hazard_activations

rope = RopeParameters(64, 64, 1e5, 8191)
print_bits(*rope_tables(rope, "cpu"))
q = hazard_activations((701, 9, 64), seed=1)
k = hazard_activations((701, 3, 64), seed=2)
print_bits(*rotary(torch.arange(701) * 11, q, k, rope=rope, impl="reference"))
"""
    one, two, five = (output_of_process(source, threads=threads) for threads in (1, 2, 5))
    assert one == two == five


def test_rotary_compiled_equals_eager(impl_device: tuple[str, str], rope: RopeParameters) -> None:
    impl, device = impl_device
    # A fresh object: nothing that an eager call left behind may be what makes tracing work.
    rope = dataclasses.replace(rope, max_position=rope.max_position + 1)
    positions, q, k = inputs(17, rope, device, seed=8)

    def twice(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary(
            positions, *rotary(positions, a, b, rope=rope, impl=impl), rope=rope, impl=impl
        )

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(twice, backend=backend, fullgraph=True)
    for a, b in zip(compiled(q, k), twice(q, k), strict=True):
        assert_bitwise_equal(a, b)


def test_control_bf16_tables_differ(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    rope = ROPES["head_64"]
    positions, q, k = inputs(65, rope, device, seed=9)
    cos, sin = (table[positions].bfloat16()[:, None] for table in rope_tables(rope, device))
    x1, x2 = q.chunk(2, dim=-1)
    hugging_face_order = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    assert not bitwise_equal(hugging_face_order, rotary(positions, q, k, rope=rope, impl=impl)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotary_grad_matches_reference(
    impl_device: tuple[str, str], rope: RopeParameters, dtype: torch.dtype
) -> None:
    impl, device = impl_device
    positions, q, _ = inputs(33, rope, device, seed=10, dtype=dtype)
    _, grad_q, grad_k = inputs(33, rope, device, seed=11, dtype=dtype)
    q64 = q.double().requires_grad_()
    (rotate_fp64(positions, q64, rope) * grad_q.double()).sum().backward()
    actual, _ = rotary_bwd(positions, grad_q, grad_k, rope=rope, impl=impl)
    bound = rotation_bound(q64.grad, grad_q, rope)
    assert bool(((actual.double() - q64.grad).abs() <= bound).all())


def test_rotary_beyond_the_table_is_never_silent(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    rope = RopeParameters(64, 64, 1e4, 16)
    _, q, k = inputs(1, rope, device, seed=12)
    outside = torch.tensor([16], device=device)
    if impl == "reference":
        with pytest.raises(IndexError):
            rotary(outside, q, k, rope=rope, impl=impl)
    else:
        assert bool(rotary(outside, q, k, rope=rope, impl=impl)[0].isnan().all())


def test_rotary_rejects_bad_inputs() -> None:
    rope = RopeParameters(8, 8, 1e4, 16)
    q = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    positions = torch.arange(2)

    def call(p: torch.Tensor, a: torch.Tensor, b: torch.Tensor, impl: str = "reference") -> None:
        rotary(p, a, b, rope=rope, impl=impl)

    with pytest.raises(InvalidInputError, match=r"positions must be 2 integers, got \(3,\)"):
        call(torch.arange(3), q, q)
    with pytest.raises(InvalidInputError, match="lose bits above 256 in bf16"):
        call(positions.bfloat16(), q, q)
    with pytest.raises(InvalidInputError, match=r"q must be \[T, heads, 8\]"):
        call(positions, q[..., :6], q)
    with pytest.raises(InvalidInputError, match=r"k must be 2 rows of torch\.bfloat16, got 1"):
        call(positions, q, q[:1])
    with pytest.raises(InvalidInputError, match=r"k must be 2 rows of torch\.bfloat16, got 2 of"):
        call(positions, q, q.float())
    with pytest.raises(UnsupportedError, match="impl 'neox' is not supported"):
        call(positions, q, q, impl="neox")
