"""What surrounds DeepGEMM: refusals and the start-up probe, with a stand-in for the library.

The library itself runs in the other files' tests, on a GPU; there it is also held against vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from consistent_kernels.deep_gemm_start import check_rows
from consistent_kernels.errors import NumericsError, UnsupportedError
from consistent_kernels.fp8_linear import deep_gemm, fp8_linear, spec
from consistent_kernels.fp8_linear.probe import probe_operands, rows_that_differ
from consistent_kernels.fp8_linear.reference import fp8_gemm_ref
from consistent_kernels.quantization import quantize_rows, quantize_weight, tma_aligned_scales
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations

Pair = tuple[torch.Tensor, torch.Tensor]


def faithful(a: Pair, b: Pair, d: torch.Tensor, *, disable_ue8m0_cast: bool) -> None:
    d.copy_(fp8_gemm_ref(*a, *b, torch.bfloat16))


def small_batches_split_k(a: Pair, b: Pair, d: torch.Tensor, *, disable_ue8m0_cast: bool) -> None:
    if a[0].shape[0] >= 32:
        return faithful(a, b, d, disable_ue8m0_cast=disable_ue8m0_cast)
    half = a[0].shape[1] // 2
    groups = half // spec.BLOCK_K
    parts = [
        fp8_gemm_ref(
            a[0][:, columns].contiguous(),
            a[1][:, scales],
            b[0][:, columns].contiguous(),
            b[1][:, scales],
            torch.float32,
        )
        for columns, scales in (
            (slice(0, half), slice(0, groups)),
            (slice(half, None), slice(groups, None)),
        )
    ]
    d.copy_(parts[0] + parts[1])
    return None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., None]], None]]:
    """Put a function in the place of `fp8_gemm_nt`, and a Hopper GPU in that of the CPU."""
    monkeypatch.setattr(deep_gemm, "LARGEST_ROWS", 300)
    monkeypatch.setattr(deep_gemm, "PROBED_ROWS", (1, 16, 64, 256))
    monkeypatch.setattr(deep_gemm, "_capability", lambda _: 9)
    deep_gemm.start.cache_clear()

    def use(function: Callable[..., None]) -> None:
        stand_in = SimpleNamespace(fp8_gemm_nt=function)
        monkeypatch.setattr(deep_gemm, "_library", lambda: stand_in)

    yield use
    deep_gemm.start.cache_clear()


def operands(rows: int = 9) -> tuple[torch.Tensor, Pair]:
    master = hazard_activations((192, 512), seed=1)
    weight = quantize_weight(master, scale_format="fp32", impl="reference")
    return hazard_activations((rows, 512), seed=2), weight


def call(x: torch.Tensor, weight: Pair) -> torch.Tensor:
    values, scale = quantize_rows(x, scale_format="fp32", impl="reference")
    return deep_gemm.fp8_gemm_deep_gemm(values, scale, *weight, torch.bfloat16, "fp32")


def test_scales_reach_the_library_aligned(library: Callable) -> None:
    seen = {}

    def record(a: Pair, b: Pair, d: torch.Tensor, *, disable_ue8m0_cast: bool) -> None:
        seen[a[0].shape[0]] = a[1].stride(), disable_ue8m0_cast
        faithful(a, b, d, disable_ue8m0_cast=disable_ue8m0_cast)

    library(record)
    x, weight = operands(rows=9)
    y = call(x, weight)
    assert seen[9] == ((1, 12), True)
    assert_bitwise_equal(y, fp8_linear(x, *weight, scale_format="fp32", impl="reference"))
    values, scale = quantize_rows(x, scale_format="ue8m0", impl="reference")
    deep_gemm.multiply(values, tma_aligned_scales(scale), *weight, "ue8m0")
    assert seen[9] == ((1, 12), False), "a power of two may be cast"


def test_probe_passes_a_kernel_that_ignores_the_batch_and_runs_once(library: Callable) -> None:
    calls = []

    def counting(*args: Pair, **options: bool) -> None:
        calls.append(args[0][0].shape[0])
        faithful(*args, **options)

    library(counting)
    x, weight = operands()
    call(x, weight)
    assert calls[0] == 300
    assert set(calls[1:-1]) == {1, 16, 64, 256}
    before = len(calls)
    call(x, weight)
    assert len(calls) == before + 1


def test_control_probe_refuses_a_kernel_that_splits_small_batches(library: Callable) -> None:
    library(small_batches_split_k)
    x, weight = operands()
    with pytest.raises(NumericsError, match=r"calls of \(1, 16\) have other bits .* 'triton'"):
        call(x, weight)


def test_start_of_a_model_checks_its_rows(library: Callable) -> None:
    cpu = torch.device("cpu")
    shape = deep_gemm.Fp8GemmShape(128, 512, 100, "fp32")
    library(faithful)
    check_rows(shape, cpu)
    library(small_batches_split_k)
    with pytest.raises(NumericsError, match=r"Fp8GemmShape\(columns=128.* M=1 and M=100"):
        check_rows(shape, cpu)


def test_probe_operands_show_the_order_of_blocks() -> None:
    x, x_scale, weight, weight_scale = probe_operands(8, 128, 640, torch.device("cpu"))
    flipped = (
        t.view(torch.uint8).view(t.shape[0], -1, 128).flip(1).reshape(t.shape) for t in (x, weight)
    )
    x_flipped, weight_flipped = (t.view(torch.float8_e4m3fn) for t in flipped)
    ascending = fp8_gemm_ref(x, x_scale, weight, weight_scale, torch.bfloat16)
    descending = fp8_gemm_ref(
        x_flipped, x_scale.flip(1), weight_flipped, weight_scale.flip(1), torch.bfloat16
    )
    assert bool(ascending.isfinite().all())
    assert not bitwise_equal(ascending, descending)


def test_rows_that_differ_names_them() -> None:
    given = probe_operands(64, 64, 256, torch.device("cpu"))

    def run(some: tuple[torch.Tensor, ...]) -> torch.Tensor:
        y = fp8_gemm_ref(*some, torch.bfloat16)
        return y.neg() if some[0].shape[0] == 16 else y

    assert rows_that_differ(run, given, (1, 16, 32)) == (16,)


@pytest.mark.parametrize(
    ("shape", "out_dtype", "scale_format", "major", "named"),
    [
        ((100, 512), torch.bfloat16, "fp32", 9, r"weight \(100, 512\)"),
        ((192, 200), torch.bfloat16, "fp32", 9, r"weight \(192, 200\)"),
        ((192, 512), torch.float32, "fp32", 9, r"out_dtype torch\.float32"),
        ((192, 512), torch.bfloat16, "fp32", 10, r"scale_format 'fp32' on compute capability 10"),
        ((192, 512), torch.bfloat16, "fp32", 8, r"compute capability 8\.x"),
    ],
)
def test_deep_gemm_rejects_what_it_cannot_serve(
    shape: tuple[int, int], out_dtype: torch.dtype, scale_format: str, major: int, named: str
) -> None:
    with pytest.raises(UnsupportedError, match=named) as caught:
        deep_gemm.check_supported(*shape, out_dtype, scale_format, major)
    assert "impl 'triton'" in str(caught.value)


def test_deep_gemm_serves_hopper_and_blackwell() -> None:
    deep_gemm.check_supported(192, 512, torch.bfloat16, "fp32", 9)
    deep_gemm.check_supported(192, 512, torch.bfloat16, "ue8m0", 9)
    deep_gemm.check_supported(192, 512, torch.bfloat16, "ue8m0", 10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_fp8_linear_equals_vllm_deep_gemm_path(rows: int, scale_format: str) -> None:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils.deep_gemm import fp8_gemm_nt

    master = hazard_activations((192, 512), seed=3, device="cuda")
    x = hazard_activations((rows, 512), seed=4, device="cuda")
    weight = quantize_weight(master, scale_format=scale_format, impl="triton")
    power = scale_format == "ue8m0"
    stock = torch.empty((rows, 192), dtype=torch.bfloat16, device="cuda")
    a = per_token_group_quant_fp8(
        x, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=power
    )
    fp8_gemm_nt(a, weight, stock, is_deep_gemm_e8m0_used=power)
    ours = fp8_linear(x, *weight, scale_format=scale_format, impl="deep_gemm")
    assert_bitwise_equal(ours, stock)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_is_close_to_vllm_block_scaled_mm() -> None:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

    weight = quantize_weight(
        hazard_activations((256, 1024), seed=5, device="cuda"), scale_format="fp32", impl="triton"
    )
    x = hazard_activations((65, 1024), seed=6, device="cuda")
    a = quantize_rows(x, scale_format="fp32", impl="triton")
    ours = fp8_linear(x, *weight, scale_format="fp32", impl="triton")
    stock = w8a8_triton_block_scaled_mm(
        a[0], weight[0], a[1], weight[1], [128, 128], torch.bfloat16
    )
    spread = a[1].double().repeat_interleave(128, 1)
    w_spread = weight[1].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    magnitude = (a[0].double().abs() * spread) @ (weight[0].double().abs() * w_spread).t()
    # Twice the error of one tensor-core sum (see test_fp8_linear.py), and two roundings to bf16.
    bound = 2 * magnitude * (4 * 33 * 2**-13 + 11 * 2**-23) + ours.double().abs() * 2**-7
    assert bool(((ours.double() - stock.double()).abs() <= bound).all())
