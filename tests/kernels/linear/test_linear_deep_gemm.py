"""DeepGEMM's program: rows alone and together, columns fused and separate, its refusals."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.deep_gemm_start import PIECES, ROWS, pieces
from consistent_kernels.errors import NumericsError, UnsupportedError
from consistent_kernels.linear import deep_gemm, deep_gemm_start, linear, prepare_weight
from consistent_kernels.linear.deep_gemm import is_served
from consistent_kernels.linear.deep_gemm_start import GemmShape, check_rows
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
)

cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="DeepGEMM needs a CUDA device"),
]
SHAPES = (GemmShape(576, 1536, 1100), GemmShape(3072, 576, 1100), GemmShape(4096, 576, 300, True))


@pytest.mark.parametrize(
    ("columns", "inner", "has_bias", "out_dtype", "served"),
    [
        (576, 1536, False, torch.bfloat16, True),
        (576, 1536, True, torch.bfloat16, False),
        (12, 64, False, torch.bfloat16, False),
        (12, 64, False, torch.float32, True),
        (16, 60, False, torch.bfloat16, False),
    ],
)
def test_linear_deep_gemm_is_chosen_by_layer(
    columns: int, inner: int, has_bias: bool, out_dtype: torch.dtype, served: bool
) -> None:
    assert is_served(columns, inner, has_bias, out_dtype) is served


@pytest.mark.parametrize("rows", [0, 1, 511, 512, 513, 1023, 5000, 16384, 16385, 40000])
def test_linear_deep_gemm_calls_are_few_sizes(rows: int) -> None:
    sizes = pieces(rows)
    assert sum(sizes) == rows
    assert all(size in PIECES for size in sizes[:-1])
    assert list(sizes) == sorted(sizes, reverse=True)
    # Whatever is called was compiled and probed, or is below the smallest piece.
    assert all(size in ROWS or size < min(PIECES) for size in sizes)


def test_gemm_shape_probes_both_sides_of_tile_choices() -> None:
    rows = GemmShape(64, 64, 200).rows()
    assert rows == sorted(rows)
    assert rows[0] == 1
    assert rows[-1] == 200
    assert {16, 17, 64, 65, 128, 129, 192} <= set(rows)


@pytest.fixture(scope="module")
def prepared() -> torch.device:
    """A device on which every kernel of SHAPES is compiled and probed."""
    device = torch.device("cuda", torch.cuda.current_device())
    deep_gemm_start.prepare(SHAPES, device)
    return device


def _weight(shape: GemmShape, device: torch.device) -> torch.Tensor:
    master = torch.randn(shape.columns, shape.inner, generator=torch.Generator().manual_seed(2))
    return prepare_weight((master * 0.05).to(device), dtype=torch.bfloat16, impl="deep_gemm")


class TestOnHopper:
    pytestmark = cuda

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_linear_deep_gemm_is_batch_invariant(
        self, prepared: torch.device, shape: GemmShape
    ) -> None:
        x = hazard_activations((shape.max_rows, shape.inner), seed=4, device=prepared)
        weight = _weight(shape, prepared)
        options = {"impl": "deep_gemm", "out_dtype": shape.out_dtype}
        whole = linear(x, weight, **options)
        for rows in (size for size in BATCH_SIZES if size < shape.max_rows):
            for start in {0, 5, shape.max_rows - rows}:
                part = slice(start, start + rows)
                assert_bitwise_equal(linear(x[part], weight, **options), whole[part])

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_linear_deep_gemm_matches_fp64(self, prepared: torch.device, shape: GemmShape) -> None:
        x = hazard_activations((65, shape.inner), seed=1, device=prepared)
        weight = _weight(shape, prepared)
        y = linear(x, weight, impl="deep_gemm", out_dtype=shape.out_dtype)
        exact = x.double() @ weight.double().t()
        # As in test_linear_matches_reference: K fp32 additions that may truncate, one rounding.
        magnitude = x.double().abs() @ weight.double().abs().t()
        rounding = 0.0 if shape.out_fp32 else 2**-8
        bound = magnitude * (shape.inner + 1) * 2**-23 * (1 + rounding) + exact.abs() * rounding
        assert bool(((y.double() - exact).abs() <= bound).all())

    def test_linear_deep_gemm_fused_columns_equal_separate(self, prepared: torch.device) -> None:
        shape = SHAPES[1]
        x = hazard_activations((130, shape.inner), seed=7, device=prepared)
        weight = _weight(shape, prepared)
        fused = linear(x, weight, impl="deep_gemm")
        parts = [linear(x, part, impl="deep_gemm") for part in weight.split((1536, 1024, 512))]
        assert_bitwise_equal(torch.cat(parts, 1), fused)

    def test_linear_deep_gemm_ignores_layout_of_rows(self, prepared: torch.device) -> None:
        shape = SHAPES[0]
        wide = hazard_activations((20, 2 * shape.inner + 1), seed=8, device=prepared)
        weight = _weight(shape, prepared)
        view = wide[:, 1 : 1 + shape.inner]
        expected = linear(view.contiguous(), weight, impl="deep_gemm")
        assert_bitwise_equal(linear(view, weight, impl="deep_gemm"), expected)

    def test_linear_with_bias_runs_triton(self, prepared: torch.device) -> None:
        shape = SHAPES[0]
        x = hazard_activations((20, shape.inner), seed=9, device=prepared)
        weight = _weight(shape, prepared)
        bias = torch.randn(shape.columns, device=prepared).bfloat16()
        assert_bitwise_equal(
            linear(x, weight, bias, impl="deep_gemm"), linear(x, weight, bias, impl="triton")
        )

    def test_linear_deep_gemm_rejects_float16(self, prepared: torch.device) -> None:
        x = torch.zeros(4, 64, device=prepared, dtype=torch.float16)
        with pytest.raises(UnsupportedError, match="bfloat16"):
            linear(x, torch.zeros(64, 64, device=prepared, dtype=torch.float16), impl="deep_gemm")

    def test_control_cublas_rows_follow_the_batch(self, prepared: torch.device) -> None:
        x = hazard_activations((1024, 12288), seed=11, device=prepared)
        weight = _weight(GemmShape(4096, 12288, 1024), prepared)
        whole = torch.nn.functional.linear(x, weight)
        same = [
            bitwise_equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows])
            for rows in (1, 8, 16, 64, 128)
        ]
        assert not all(same)

    def test_control_start_refuses_rows_that_follow_the_batch(
        self, prepared: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fault(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
            deep_gemm.gemm(x, weight, y)
            if x.shape[0] == 17:
                y.view(torch.int16)[3, 5] ^= 1

        monkeypatch.setattr(deep_gemm_start, "gemm", fault)
        with pytest.raises(NumericsError, match="M=17"):
            check_rows(SHAPES[0], prepared)
