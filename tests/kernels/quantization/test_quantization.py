"""Relations of FP8 quantization: against an integer-exact oracle, rows alone and together."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.quantization import (
    dequantize_blocks,
    dequantize_rows,
    quantize_blocks,
    quantize_rows,
    quantize_weight,
)
from consistent_kernels.testing import (
    MANY_BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    poisoned_rows,
)

FORMATS = ("fp32", "ue8m0")
WIDTHS = (1, 127, 128, 300, 1536)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

FINITE = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
"""All finite non-negative float8_e4m3fn, ascending."""


def nearest_even(scaled: torch.Tensor) -> torch.Tensor:
    """Round fp64 numbers to float8_e4m3fn by search: an oracle that shares no code with a cast."""
    magnitude = scaled.abs().clamp(max=448.0)
    above = torch.searchsorted(FINITE, magnitude.contiguous()).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = FINITE[above] - magnitude, magnitude - FINITE[below]
    even = torch.where(above % 2 == 0, above, below)
    code = torch.where(up < down, above, torch.where(down < up, below, even))
    code = torch.where(FINITE[above] == magnitude, above, code)
    return (code + 128 * scaled.signbit()).to(torch.uint8)


def power_of_two_above(value: Fraction) -> Fraction:
    power = Fraction(1)
    while power < value:
        power *= 2
    while power / 2 >= value:
        power /= 2
    return power


def run(x: torch.Tensor, scale_format: str, impl: str, **more: bool) -> tuple[torch.Tensor, ...]:
    return quantize_rows(x, scale_format=scale_format, impl=impl, **more)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_quantize_rows_matches_oracle(
    impl_device: tuple[str, str], width: int, dtype: torch.dtype, scale_format: str
) -> None:
    impl, device = impl_device
    x = hazard_activations((33, width), seed=1, dtype=dtype, device=device)
    values, scale = run(x, scale_format, impl)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (33, -(-width // 128))
    x, values, scale = x.cpu(), values.cpu(), scale.cpu()
    for group, part in enumerate(x.split(128, 1)):
        amax = part.double().abs().amax(1).clamp(min=torch.tensor(1e-10).double())
        # The fp64 quotient of two fp32 numbers rounds to fp32 as the exact quotient does.
        expected = (amax / 448).float()
        if scale_format == "ue8m0":
            floor = torch.tensor(1e-10).item()
            exact = [power_of_two_above(Fraction(max(s, floor))) for s in expected.tolist()]
            expected = torch.tensor([float(power) for power in exact])
        assert_bitwise_equal(scale[:, group], expected, f"scale of group {group}")
        # x / s in fp32 first, as the spec says: the fp8 rounding is the second one.
        scaled = (part.double() / expected.double()[:, None]).float().double()
        stored = values[:, 128 * group : 128 * (group + 1)].contiguous().view(torch.uint8)
        assert_bitwise_equal(stored, nearest_even(scaled), f"values of group {group}")


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 300), (256, 384), (40, 1000)])
def test_quantize_blocks_matches_oracle(
    impl_device: tuple[str, str], shape: tuple[int, int], scale_format: str
) -> None:
    impl, device = impl_device
    weight = hazard_activations(shape, seed=2, device=device)
    values, scale = quantize_blocks(weight, scale_format=scale_format, impl=impl)
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    weight, values, scale = weight.cpu(), values.cpu(), scale.cpu()
    for i, rows in enumerate(weight.split(128, 0)):
        for j, block in enumerate(rows.split(128, 1)):
            expected = (block.double().abs().amax() / 448).float()
            if scale_format == "ue8m0":
                expected = torch.tensor(float(power_of_two_above(Fraction(expected.item()))))
            assert_bitwise_equal(scale[i, j], expected, f"scale of block {i}, {j}")
            inverse = (1 / expected.double()).float()
            scaled = (block.double() * inverse.double()).float().double()
            stored = values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].contiguous()
            assert_bitwise_equal(stored.view(torch.uint8), nearest_even(scaled))


@pytest.mark.parametrize("scale_format", FORMATS)
def test_dequantized_error_is_bounded(impl_device: tuple[str, str], scale_format: str) -> None:
    impl, device = impl_device
    x = hazard_activations((65, 512), seed=3, device=device)
    values, scale = run(x, scale_format, impl)
    error = (dequantize_rows(values, scale).double() - x.double()).abs()
    # Three mantissa bits: half a unit in the last place is 2^-4 of a normal value, and 2^-10 of the
    # scale below the smallest normal one; two fp32 roundings besides.
    spread = scale.double().repeat_interleave(128, 1)
    bound = torch.maximum(x.double().abs() * 2**-4, spread * 2**-10) * (1 + 2**-20)
    assert bool((error <= bound).all())
    weight = hazard_activations((200, 300), seed=4, device=device)
    values, scale = quantize_blocks(weight, scale_format=scale_format, impl=impl)
    error = (dequantize_blocks(values, scale).double() - weight.double()).abs()
    spread = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    bound = torch.maximum(weight.double().abs() * 2**-4, spread * 2**-10) * (1 + 2**-20)
    assert bool((error <= bound).all())


@pytest.mark.parametrize("scale_format", FORMATS)
def test_quantize_rows_is_batch_invariant(impl_device: tuple[str, str], scale_format: str) -> None:
    impl, device = impl_device
    most = 2100
    x = hazard_activations((most, 576), seed=5, device=device)
    whole = run(x, scale_format, impl)
    for rows in MANY_BATCH_SIZES:
        for start in {0, 5, most - rows}:
            part = slice(start, min(start + rows, most))
            for actual, expected in zip(run(x[part], scale_format, impl), whole, strict=True):
                assert_bitwise_equal(actual, expected[part], f"rows {part}")
    order = torch.randperm(most, generator=torch.Generator().manual_seed(1)).to(device)
    for actual, expected in zip(run(x[order], scale_format, impl), whole, strict=True):
        assert_bitwise_equal(actual.view(torch.uint8), expected.view(torch.uint8)[order])


def test_control_a_scale_of_the_whole_tensor_follows_the_batch() -> None:
    x = hazard_activations((8, 128), seed=6)

    def per_tensor(rows: torch.Tensor) -> torch.Tensor:
        scale = rows.float().abs().amax() / 448
        return (rows.float() / scale).to(torch.float8_e4m3fn)

    assert not bitwise_equal(per_tensor(x)[:1], per_tensor(x[:1]))


@pytest.mark.parametrize("scale_format", FORMATS)
def test_quantize_ignores_poison(impl_device: tuple[str, str], scale_format: str) -> None:
    impl, device = impl_device
    x = hazard_activations((9, 300), seed=7, device=device)
    expected = run(x, scale_format, impl)
    buffer, rows = poisoned_rows(x, before=3, after=4)
    for actual, clean in zip(run(buffer, scale_format, impl), expected, strict=True):
        assert_bitwise_equal(actual[rows], clean)
    # NaN stands behind each row, in the lanes of the last, shorter group.
    gaps = torch.full((9, 384), float("nan"), dtype=x.dtype, device=device)
    gaps[:, :300] = x
    for actual, clean in zip(run(gaps[:, :300], scale_format, impl), expected, strict=True):
        assert_bitwise_equal(actual, clean)
    whole = quantize_blocks(x, scale_format=scale_format, impl=impl)
    strided = quantize_blocks(gaps[:, :300], scale_format=scale_format, impl=impl)
    for actual, clean in zip(strided, whole, strict=True):
        assert_bitwise_equal(actual, clean)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_quantize_makes_a_nonfinite_group_nan(
    impl_device: tuple[str, str], scale_format: str, bad: float
) -> None:
    impl, device = impl_device
    x = hazard_activations((4, 384), seed=8, device=device)
    clean = run(x, scale_format, impl)
    x[2, 200] = bad
    values, scale = run(x, scale_format, impl)
    assert scale[2, 1].view(torch.int32).item() == 0x7FC00000
    assert bool((values.view(torch.uint8)[2, 128:256] == 0x7F).all())
    keep = torch.ones(4, 3, dtype=torch.bool, device=device)
    keep[2, 1] = False
    assert_bitwise_equal(scale[keep], clean[1][keep])
    columns = keep.repeat_interleave(128, 1)
    assert_bitwise_equal(values.view(torch.uint8)[columns], clean[0].view(torch.uint8)[columns])
    values, scale = quantize_blocks(x, scale_format=scale_format, impl=impl)
    assert scale[0].isnan().tolist() == [False, True, False]
    assert bool((values.view(torch.uint8)[:, 128:256] == 0x7F).all())


def test_quantize_zero_groups_and_signs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = torch.zeros((2, 256), dtype=torch.bfloat16, device=device)
    x[:, ::3] = -0.0
    x[1, 128:] = 1e-12  # below the floor of the maximum
    smallest = {"fp32": (torch.tensor(1e-10) / torch.tensor(448.0)).item(), "ue8m0": 2.0**-33}
    for scale_format, floor in smallest.items():
        values, scale = run(x, scale_format, impl)
        assert scale.unique().tolist() == [floor]
        signs = values.view(torch.uint8)[0]
        assert bool((signs[::3] == 0x80).all())
        assert set(signs.tolist()) == {0x00, 0x80}
        weight, scale = quantize_blocks(x, scale_format=scale_format, impl=impl)
        assert scale.unique().tolist() == [floor]
        assert_bitwise_equal(weight[0], values[0])


def test_quantize_rows_rounds_ties_to_even(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    # amax 448 makes the scale 1, so these are the numbers that are rounded.
    ties = [448.0, 17.0, 19.0, -17.0, 2**-10, 3 * 2**-10, 1.0625, 1.1875, 440.0]
    even = [448.0, 16.0, 20.0, -16.0, 0.0, 2**-8, 1.0, 1.25, 448.0]
    x = torch.tensor([ties], device=device)
    for scale_format in FORMATS:
        values, scale = run(x, scale_format, impl)
        assert scale.item() == 1.0
        assert values.float().tolist() == [even]


def test_every_bfloat16_maximum_has_the_exact_power_of_two(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    bits = torch.arange(0, 0x7F80, dtype=torch.int16)
    x = bits.view(torch.bfloat16)[:, None].to(device)
    _, scale = run(x, "ue8m0", impl)
    wanted = x.cpu().double()[:, 0].clamp(min=torch.tensor(1e-10).double()) / 448
    wanted = wanted.clamp(min=torch.tensor(1e-10).double())
    mantissa, exponent = torch.frexp(wanted)
    exact = torch.ldexp(torch.ones_like(wanted), exponent - (mantissa == 0.5).int())
    assert_bitwise_equal(scale.cpu()[:, 0], exact.float())


def test_control_a_scale_rounded_after_quantizing_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((16, 256), seed=9, device=device)
    values, _ = run(x, "ue8m0", impl)
    late, _ = run(x, "fp32", impl)
    assert not bitwise_equal(values, late)


def test_control_a_multiplied_reciprocal_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    # 17 scales: a tie, unless the reciprocal's own rounding has moved it.
    amax = 1 + torch.rand(256, 1, generator=torch.Generator().manual_seed(10))
    x = torch.cat([amax, amax / torch.tensor(448.0) * 17], 1).to(device)
    values, scale = run(x, "fp32", impl)
    assert values[:, 1].float().unique().tolist() == [16.0]
    other = (x * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert not bitwise_equal(values, other)


def test_quantize_weight_is_the_same_for_both_sides(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    generator = torch.Generator().manual_seed(11)
    master = torch.randn(200, 300, generator=generator).to(device)
    for scale_format in FORMATS:
        trainer = quantize_weight(master, scale_format=scale_format, impl=impl)
        engine = quantize_weight(master.bfloat16(), scale_format=scale_format, impl=impl)
        for ours, theirs in zip(trainer, engine, strict=True):
            assert_bitwise_equal(ours, theirs)
    unrounded = quantize_blocks(master, scale_format="fp32", impl=impl)
    assert not bitwise_equal(unrounded[0], trainer[0]), "control: the cast to bf16 counts"


def through_master(
    quantized: tuple[torch.Tensor, torch.Tensor], scale_format: str, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a checkpoint of quantized weights becomes by way of a bf16 master."""
    master = dequantize_blocks(*quantized, torch.bfloat16)
    return quantize_weight(master, scale_format=scale_format, impl=impl)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_quantized_weights_survive_the_master(
    impl_device: tuple[str, str], scale_format: str
) -> None:
    impl, device = impl_device
    master = hazard_activations((300, 400), seed=15, device=device)
    first = quantize_weight(master, scale_format=scale_format, impl=impl)
    again = through_master(first, scale_format, impl)
    # A power of two whose largest value was rounded down to 224 scales has half the scale now: the
    # same products. An fp32 scale of a bf16 maximum is found again from 448 scales.
    assert_bitwise_equal(dequantize_blocks(*again), dequantize_blocks(*first))


def test_control_scales_of_no_bfloat16_maximum_do_not_survive(
    impl_device: tuple[str, str],
) -> None:
    # As in a checkpoint that was quantized from fp32: the values stay, the scale moves.
    impl, device = impl_device
    master = hazard_activations((300, 400), seed=16, device=device)
    values, scale = quantize_weight(master, scale_format="fp32", impl=impl)
    foreign = values, scale * (1 + 2**-10)
    again = through_master(foreign, "fp32", impl)
    assert_bitwise_equal(again[0], values)
    assert not bitwise_equal(again[1], foreign[1])


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_quantize_ignores_memory_alignment(impl_device: tuple[str, str], offset: int) -> None:
    impl, device = impl_device
    x = hazard_activations((20, 300), seed=12, device=device)
    moved = torch.empty(20 * 300 + offset, dtype=x.dtype, device=device)[offset:].view(20, 300)
    moved.copy_(x)
    for actual, expected in zip(run(moved, "fp32", impl), run(x, "fp32", impl), strict=True):
        assert_bitwise_equal(actual, expected)


def test_quantize_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((17, 300), seed=13, device=device)

    def both(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = quantize_rows(value, scale_format="ue8m0", impl=impl, tma_aligned=True)
        return *rows, *quantize_blocks(value, scale_format="fp32", impl=impl)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(both, backend=backend, fullgraph=True)
    for actual, expected in zip(compiled(x), both(x), strict=True):
        assert_bitwise_equal(actual, expected)
        assert actual.stride() == expected.stride()


def test_quantize_of_no_rows_is_empty(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = torch.empty((0, 300), dtype=torch.bfloat16, device=device)
    for aligned in (False, True):
        values, scale = run(x, "fp32", impl, tma_aligned=aligned)
        assert (values.shape, scale.shape) == ((0, 300), (0, 3))
    values, scale = quantize_blocks(x, scale_format="fp32", impl=impl)
    assert (values.shape, scale.shape) == ((0, 300), (0, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantize_triton_equals_reference(dtype: torch.dtype, scale_format: str) -> None:
    x = hazard_activations((300, 1000), seed=14, dtype=dtype)
    x[5, 300] = float("nan")
    for call in (quantize_rows, quantize_blocks):
        expected = call(x, scale_format=scale_format, impl="reference")
        actual = call(x.cuda(), scale_format=scale_format, impl="triton")
        for ours, wanted in zip(actual, expected, strict=True):
            assert_bitwise_equal(ours.cpu(), wanted)


def test_quantize_rejects_bad_inputs() -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    good = {"scale_format": "fp32", "impl": "reference"}
    with pytest.raises(InvalidInputError, match=r"quantize_rows: x must be 2-D .*, got 3-D"):
        quantize_rows(x[None], **good)
    with pytest.raises(InvalidInputError, match=r"quantize_blocks: weight must be 2-D .*int32"):
        quantize_blocks(x.int(), **good)
    with pytest.raises(InvalidInputError, match="at least one column"):
        quantize_rows(x[:, :0], **good)
    with pytest.raises(UnsupportedError, match=r"scale_format 'e8m0' .* supported: fp32, ue8m0"):
        quantize_rows(x, scale_format="e8m0", impl="reference")
    with pytest.raises(UnsupportedError, match=r"impl 'cuda' .* supported: reference, triton"):
        quantize_weight(x, scale_format="fp32", impl="cuda")
    values, scale = quantize_rows(x, **good)
    with pytest.raises(InvalidInputError, match=r"quantize_weight: master must be 2-D .*float8"):
        quantize_weight(values, **good)
    with pytest.raises(InvalidInputError, match=r"values must be 2-D .*, got 0-D"):
        dequantize_rows(values[0, 0], scale)
    with pytest.raises(InvalidInputError, match=r"scale must be float32 of shape \(2, 1\)"):
        dequantize_rows(values, scale[:1])
    with pytest.raises(InvalidInputError, match=r"values must be 2-D float8_e4m3fn"):
        dequantize_blocks(x, scale)
    with pytest.raises(InvalidInputError, match="scale must be on cpu, got meta"):
        dequantize_rows(values, scale.to("meta"))
    with pytest.raises(UnsupportedError, match=r"dtype torch\.int32 .* torch\.bfloat16"):
        dequantize_rows(values, scale, torch.int32)
    with pytest.raises(UnsupportedError, match=r"quantize_weight: model_dtype torch\.int8 is not"):
        quantize_weight(x, **good, model_dtype=torch.int8)
