"""A packed weight gives the bits of the plain one, and says when it no longer follows it."""

from __future__ import annotations

import gc

import pytest
import torch

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.linear import linear, linear_packed, onednn, pack_weight
from consistent_kernels.linear.onednn import native_bf16, packed_rows
from consistent_kernels.linear.packing import _STORE
from consistent_kernels.linear.probe import probe_inputs
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations

pytestmark = pytest.mark.skipif(native_bf16() is None, reason="this CPU has no bf16 dot product")

SHAPES = ((960, 576), (576, 1536), (192, 64), (328, 80), (80, 328))
ROWS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 65, 129, 300)


def weights(shape: tuple[int, int]) -> torch.Tensor:
    return 0.08 * torch.randn(shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_equals_plain(shape: tuple[int, int], with_bias: bool) -> None:
    columns, inner = shape
    weight = weights((columns, inner)).bfloat16()
    bias = hazard_activations((1, columns), seed=1)[0].bfloat16() if with_bias else None
    x = hazard_activations((max(ROWS), inner), seed=1).bfloat16()
    packed = pack_weight(weight, impl="onednn")
    if packed is None:
        pytest.skip("packing changes bits of this shape on this CPU, so it is not packed")
    expected = linear(x, weight, bias, impl="onednn")
    for rows in ROWS:
        assert_bitwise_equal(linear_packed(x[:rows], packed, bias), expected[:rows], f"{rows} rows")


def test_packed_is_batch_invariant_on_cancelling_sums() -> None:
    """What is left of these products is the error of the additions alone."""
    x, weight = probe_inputs(300, 576, 1536, torch.bfloat16)
    packed = pack_weight(weight, impl="onednn")
    if packed is None:
        pytest.skip("packing changes bits of this shape on this CPU, so it is not packed")
    whole = linear_packed(x, packed)
    for rows in ROWS:
        assert_bitwise_equal(linear_packed(x[7 : 7 + rows], packed), whole[7 : 7 + rows])


def test_control_a_library_that_sums_in_another_order_is_not_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reversed_order(
        x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        y = x.float().flip(1) @ packed.to_dense().float().flip(1).t()
        return (y if bias is None else y + bias.float()).bfloat16()

    monkeypatch.setattr(onednn, "_multiply_packed", reversed_order)
    assert packed_rows.__wrapped__(576, 576) == ()


def test_control_row_counts_with_other_bits_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = onednn._multiply_packed

    def split_by_rows(
        x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        y = plain(x, packed, bias)
        if x.shape[0] == 64:
            y.view(torch.int16)[0, 0] ^= 1
        return y

    monkeypatch.setattr(onednn, "_multiply_packed", split_by_rows)
    admitted = packed_rows.__wrapped__(576, 576)
    assert 64 not in admitted
    assert 16 in admitted


def test_rebuild_follows_the_weight() -> None:
    weight = weights((192, 576)).bfloat16()
    x = hazard_activations((16, 576), seed=1).bfloat16()
    packed = pack_weight(weight, impl="onednn")
    assert packed.follows(weight)
    number = packed.number
    weight.view(torch.int16)[3, 5] ^= 1
    assert not packed.follows(weight)
    packed.rebuild(weight)
    assert packed.follows(weight)
    assert packed.number == number
    assert_bitwise_equal(linear_packed(x, packed), linear(x, weight, impl="onednn"))


def test_a_copy_is_freed_with_its_owner() -> None:
    packed = pack_weight(weights((192, 576)).bfloat16(), impl="onednn")
    number = packed.number
    assert number in _STORE
    del packed
    gc.collect()
    assert number not in _STORE


def test_only_bf16_weights_of_programs_with_a_layout_are_packed() -> None:
    weight = weights((192, 576))
    assert pack_weight(weight, impl="onednn") is None
    assert pack_weight(weight, impl="llvm") is None
    assert pack_weight(weight.bfloat16(), impl="reference") is None


def test_rejects_other_shapes_and_dtypes() -> None:
    packed = pack_weight(weights((192, 576)).bfloat16(), impl="onednn")
    for x in (torch.zeros(4, 64).bfloat16(), torch.zeros(4, 576), torch.zeros(576).bfloat16()):
        with pytest.raises(InvalidInputError, match="x must be"):
            linear_packed(x, packed)
    with pytest.raises(InvalidInputError, match="bias"):
        linear_packed(torch.zeros(4, 576).bfloat16(), packed, torch.zeros(64).bfloat16())


def test_fake_shape_under_compile() -> None:
    packed = pack_weight(weights((192, 576)).bfloat16(), impl="onednn")
    x = hazard_activations((5, 576), seed=1).bfloat16()
    compiled = torch.compile(
        lambda y: linear_packed(y, packed) * 2, backend="eager", fullgraph=True
    )
    assert_bitwise_equal(compiled(x), linear_packed(x, packed) * 2)
