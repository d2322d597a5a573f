"""Scales in DeepGEMM's layouts hold the same bits; on a GPU, as DeepGEMM's own functions make."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.errors import InvalidInputError
from consistent_kernels.quantization import (
    pack_ue8m0_scales,
    quantize_rows,
    tma_aligned_scales,
    unpack_ue8m0_scales,
)
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations

ROWS = (1, 3, 4, 5, 64, 129)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("groups", [1, 4, 7])
def test_tma_aligned_scales_hold_the_same_bits(
    impl_device: tuple[str, str], rows: int, groups: int
) -> None:
    impl, device = impl_device
    x = hazard_activations((rows, 128 * groups), seed=1, device=device)
    values, scale = quantize_rows(x, scale_format="fp32", impl=impl)
    copied = tma_aligned_scales(scale)
    values_direct, direct = quantize_rows(x, scale_format="fp32", impl=impl, tma_aligned=True)
    for aligned in (copied, direct):
        assert aligned.stride() == (1, -(-rows // 4) * 4)
        assert aligned.data_ptr() % 16 == 0
        assert_bitwise_equal(aligned, scale)
    assert_bitwise_equal(values_direct, values)
    assert tma_aligned_scales(direct) is direct


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("groups", [1, 4, 7])
def test_packed_ue8m0_scales_round_trip(
    impl_device: tuple[str, str], rows: int, groups: int
) -> None:
    impl, device = impl_device
    x = hazard_activations((rows, 128 * groups), seed=2, device=device)
    x[0, 0] = float("nan")
    _, scale = quantize_rows(x, scale_format="ue8m0", impl=impl)
    packed = pack_ue8m0_scales(scale)
    assert packed.shape == (rows, -(-groups // 4))
    assert packed.stride() == (1, -(-rows // 4) * 4)
    assert_bitwise_equal(unpack_ue8m0_scales(packed, groups), scale)


def test_packed_words_hold_neighbours_from_the_low_byte_up() -> None:
    scale = torch.tensor([[1.0, 2.0, 0.5, 4.0, 2.0**-33]])
    expected = [127 | 128 << 8 | 126 << 16 | 129 << 24, 94]
    packed = [word & 0xFFFFFFFF for word in pack_ue8m0_scales(scale)[0].tolist()]
    assert packed == expected


def test_layouts_reject_bad_inputs() -> None:
    with pytest.raises(InvalidInputError, match=r"scale must be 2-D torch.float32, got 1-D"):
        tma_aligned_scales(torch.zeros(3))
    with pytest.raises(InvalidInputError, match=r"scale must be 2-D torch.float32"):
        pack_ue8m0_scales(torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises(InvalidInputError, match=r"scale must be 2-D torch.int32"):
        unpack_ue8m0_scales(torch.zeros(3, 3), 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", ROWS)
def test_layouts_equal_deep_gemm(rows: int) -> None:
    from consistent_kernels.vendored import deep_gemm

    library = deep_gemm()
    x = hazard_activations((rows, 128 * 8), seed=3, device="cuda")
    _, scale = quantize_rows(x, scale_format="ue8m0", impl="triton")
    theirs = library.get_mn_major_tma_aligned_tensor(scale)
    ours = tma_aligned_scales(scale)
    assert theirs.stride() == ours.stride()
    assert_bitwise_equal(ours, theirs)
    theirs = library.get_mn_major_tma_aligned_packed_ue8m0_tensor(scale)
    ours = pack_ue8m0_scales(scale)
    assert theirs.stride() == ours.stride()
    assert_bitwise_equal(ours, theirs)


def test_unpack_ue8m0_scales_refuses_columns_that_are_not_there() -> None:
    words = torch.zeros(2, 1, dtype=torch.int32)
    assert unpack_ue8m0_scales(words, 4).shape == (2, 4)
    with pytest.raises(InvalidInputError, match="columns must be at most 4 of 1 words, got 5"):
        unpack_ue8m0_scales(words, 5)
