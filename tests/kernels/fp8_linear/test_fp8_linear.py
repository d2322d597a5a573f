"""Relations of the FP8 linear: against fp64, rows alone and together, columns fused and apart."""

from __future__ import annotations

import pytest
import torch
from implementations import HAS_DEEP_GEMM

from consistent_kernels import deep_gemm_start
from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.fp8_linear import fp8_gemm, fp8_linear, fp8_linear_bwd, warm_up
from consistent_kernels.fp8_linear.deep_gemm import Fp8GemmShape
from consistent_kernels.fp8_linear.spec import quantization_of
from consistent_kernels.quantization import (
    dequantize_blocks,
    dequantize_rows,
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
SHAPES = ((192, 512), (256, 1536), (17, 33), (80, 200))
"""(N, K): the first two are what DeepGEMM takes. It compiles seconds for each shape, so its tests
share (192, 512); benchmarks/ops checks its rows at the widths of models."""

HALVES = (slice(0, 128), slice(128, 256))

Weight = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    """Compile the library's kernels in parallel: one after another takes minutes."""
    if HAS_DEEP_GEMM:
        device = torch.device("cuda", torch.cuda.current_device())
        shapes = [Fp8GemmShape(columns, 512, 1100, "fp32") for columns in (64, 128, 192)]
        deep_gemm_start.prepare(shapes, device)


def weights(
    columns: int, inner: int, impl: str, device: str, *, scale_format: str = "fp32", seed: int = 2
) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    master = (torch.randn(columns, inner, generator=generator) * 0.05).to(device)
    return quantize_weight(master, scale_format=scale_format, impl=quantization_of(impl))


def run(
    x: torch.Tensor,
    weight: Weight,
    impl: str,
    *,
    scale_format: str = "fp32",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return fp8_linear(x, *weight, scale_format=scale_format, impl=impl, out_dtype=out_dtype)


def seen(x: torch.Tensor, weight: Weight, impl: str, scale_format: str) -> Weight:
    """What the forward multiplies, in fp64."""
    values, scale = quantize_rows(x, scale_format=scale_format, impl=quantization_of(impl))
    x_spread = scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]
    w_spread = weight[1].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    rows, columns = weight[0].shape
    return values.double() * x_spread, weight[0].double() * w_spread[:rows, :columns]


def error_bound(x64: torch.Tensor, w64: torch.Tensor, impl: str) -> torch.Tensor:
    """Bound of the fp32 result: inside a block, then over blocks, relative to magnitudes."""
    magnitude = x64.abs() @ w64.abs().t()
    blocks = -(-x64.shape[1] // 128)
    if impl == "reference":
        # 128 additions inside a block (products are exact), a product with the scales, which are
        # themselves rounded once, and one addition a block; each off by 2^-24 of the magnitudes.
        return magnitude * (128 + 2 + blocks) * 2**-24 * (1 + 2**-10)
    # A tensor core instruction adds 32 products and the accumulator, aligned to the largest and
    # truncated to 13 fractional bits: each of the 33 is off by 2^-13 of the largest at most.
    # Four instructions a block, then as above.
    return magnitude * (4 * 33 * 2**-13 + (3 + blocks) * 2**-23)


def served(impl: str, columns: int, inner: int, out_dtype: torch.dtype = torch.bfloat16) -> bool:
    whole = columns % 64 == 0 and inner % 128 == 0
    return impl != "deep_gemm" or (whole and out_dtype == torch.bfloat16)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_fp8_linear_matches_reference(
    impl_device: tuple[str, str],
    columns: int,
    inner: int,
    scale_format: str,
    out_dtype: torch.dtype,
) -> None:
    impl, device = impl_device
    if impl == "deep_gemm" and (columns, inner) == (256, 1536):
        pytest.skip("DeepGEMM: one shape here, the widths of models in benchmarks/ops")
    x = hazard_activations((65, inner), seed=1, device=device)
    weight = weights(columns, inner, impl, device, scale_format=scale_format)
    if not served(impl, columns, inner, out_dtype):
        with pytest.raises(UnsupportedError, match="impl 'triton'"):
            run(x, weight, impl, scale_format=scale_format, out_dtype=out_dtype)
        return
    y = run(x, weight, impl, scale_format=scale_format, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    x64, w64 = seen(x, weight, impl, scale_format)
    exact, bound = x64 @ w64.t(), error_bound(x64, w64, impl)
    rounding = 2**-8 if out_dtype == torch.bfloat16 else 0.0
    bound = bound * (1 + rounding) + exact.abs() * rounding
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(("columns", "inner"), [(192, 512), (256, 1536), (80, 200)])
def test_fp8_linear_is_batch_invariant(
    impl_device: tuple[str, str], columns: int, inner: int, scale_format: str
) -> None:
    impl, device = impl_device
    if impl == "deep_gemm" and (columns, inner) != (192, 512):
        pytest.skip("DeepGEMM: one shape here, the widths of models in benchmarks/ops")
    rows_max = 2100
    x = hazard_activations((rows_max, inner), seed=4, device=device)
    weight = weights(columns, inner, impl, device, scale_format=scale_format)
    whole = run(x, weight, impl, scale_format=scale_format)
    for rows in MANY_BATCH_SIZES:
        for start in {0, 5, rows_max - rows}:
            part = slice(start, start + rows)
            y = run(x[part], weight, impl, scale_format=scale_format)
            assert_bitwise_equal(y, whole[part], f"rows {start} to {start + rows} of {rows_max}")


def test_fp8_linear_ignores_row_position(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((37, 512), seed=5, device=device)
    weight = weights(192, 512, impl, device)
    expected = run(x, weight, impl)
    for seed in range(4):
        order = torch.randperm(37, generator=torch.Generator().manual_seed(seed)).to(device)
        assert_bitwise_equal(run(x[order], weight, impl), expected[order])


@pytest.mark.parametrize("rows", [1, 7, 16, 33, 256])
@pytest.mark.parametrize("parts", [(512, 128, 128), (256, 256), (128, 64)])
def test_fp8_linear_fused_columns_equal_separate(
    impl_device: tuple[str, str], parts: tuple[int, ...], rows: int
) -> None:
    impl, device = impl_device
    if impl == "deep_gemm" and parts != (128, 64):
        pytest.skip("DeepGEMM: one fused shape, it compiles seconds for each")
    x = hazard_activations((rows, 512), seed=8, device=device)
    pieces = [weights(size, 512, impl, device, seed=20 + i) for i, size in enumerate(parts)]
    fused = tuple(torch.cat(tensors) for tensors in zip(*pieces, strict=True))
    separate = torch.cat([run(x, piece, impl) for piece in pieces], dim=1)
    assert_bitwise_equal(run(x, fused, impl), separate)


def test_quantized_fused_weight_equals_its_parts(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    generator = torch.Generator().manual_seed(9)
    masters = [torch.randn(n, 512, generator=generator).to(device) for n in (256, 128, 64)]
    quantize = {"scale_format": "fp32", "impl": quantization_of(impl)}
    fused = quantize_weight(torch.cat(masters), **quantize)
    parts = zip(*(quantize_weight(master, **quantize) for master in masters), strict=True)
    for whole, pieces in zip(fused, parts, strict=True):
        assert_bitwise_equal(whole, torch.cat(pieces))
    # A cut off a multiple of 128 shares a block between two weights, and with it the scale.
    shifted = quantize_weight(torch.cat([masters[2], masters[0] * 2]), **quantize)
    assert not bitwise_equal(shifted[0][:64], fused[0][-64:])


def test_fp8_linear_ignores_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((9, 512), seed=12, device=device)
    weight = weights(192, 512, impl, device)
    expected = run(x, weight, impl)
    buffer, rows = poisoned_rows(x, before=3, after=4)
    y = run(buffer, weight, impl)
    assert_bitwise_equal(y[rows], expected)
    assert bool(y[:3].isnan().all()), "a poisoned row itself stays visible"
    wide = torch.full((9, 640), float("nan"), dtype=x.dtype, device=device)
    wide[:, :512] = x
    assert_bitwise_equal(run(wide[:, :512], weight, impl), expected)
    # Rows between the last one and the next multiple of four belong to no one in the scales.
    values, scale = quantize_rows(x, scale_format="fp32", impl=quantization_of(impl))
    padded = torch.full((4, 12), float("nan"), device=device)
    padded[:, :9] = scale.t()
    y = fp8_gemm(values, padded.t()[:9], *weight, scale_format="fp32", impl=impl)
    assert_bitwise_equal(y, expected)


def test_fp8_linear_of_zero_groups(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((5, 512), seed=13, device=device)
    x[2] = -0.0
    x[3, 128:256] = 0.0
    weight = weights(192, 512, impl, device)
    y = run(x, weight, impl)
    assert bool((y[2] == 0).all())
    alone = run(x[3:4], weight, impl)
    assert_bitwise_equal(y[3:4], alone)


def test_fp8_linear_is_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((129, 512), seed=14, device=device)
    weight = weights(192, 512, impl, device)
    first = run(x, weight, impl)
    for _ in range(10):
        assert_bitwise_equal(run(x, weight, impl), first)


def test_fp8_linear_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((17, 512), seed=15, device=device)
    weight = weights(192, 512, impl, device, scale_format="ue8m0")

    def layers(value: torch.Tensor) -> torch.Tensor:
        one = run(value, weight, impl, scale_format="ue8m0")
        return run(torch.cat([one, one, one], 1)[:, :512], weight, impl, scale_format="ue8m0")

    expected = layers(x)
    # Inductor takes long to start; one of the two opaque implementations stands for both.
    backend = "inductor" if impl == "triton" else "aot_eager"
    compiled = torch.compile(layers, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_fp8_linear_graph_replay_equals_eager(impl_device: tuple[str, str], rows: int) -> None:
    impl, device = impl_device
    if device == "cpu":
        pytest.skip("CUDA graphs exist on CUDA only")
    weight = weights(192, 512, impl, device)
    warm_up(weight[0], scale_format="fp32", impl=impl)
    x = hazard_activations((rows, 512), seed=16, device=device)
    run(x, weight, impl)
    static = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static, weight, impl)
    static.copy_(x)
    graph.replay()
    assert_bitwise_equal(captured, run(x, weight, impl))


def test_fp8_linear_adds_blocks_ascending(impl_device: tuple[str, str]) -> None:
    """The layer is its blocks of 128 columns, each alone, added in fp32 from the first on."""
    impl, device = impl_device
    if impl == "deep_gemm":
        pytest.skip("DeepGEMM returns bf16, which hides the order; its probe shows it")
    x = hazard_activations((33, 512), seed=17, device=device)
    values, scale = weights(192, 512, impl, device)
    parts = []
    for block in range(4):
        part = slice(128 * block, 128 * block + 128)
        weight = values[:, part].contiguous(), scale[:, block : block + 1].contiguous()
        parts.append(run(x[:, part], weight, impl, out_dtype=torch.float32))
    whole = run(x, (values, scale), impl, out_dtype=torch.float32)
    assert_bitwise_equal(whole, ((parts[0] + parts[1]) + parts[2]) + parts[3])
    assert not bitwise_equal(whole, ((parts[3] + parts[2]) + parts[1]) + parts[0])
    assert not bitwise_equal(whole, (parts[0] + parts[1]) + (parts[2] + parts[3]))


def test_fp8_gemm_rounds_where_the_spec_says(impl_device: tuple[str, str]) -> None:
    """Small integers: their sums are exact in any order; what is left is how scales round."""
    impl, device = impl_device
    if impl == "deep_gemm":
        pytest.skip("DeepGEMM returns bf16; test_deep_gemm.py holds its bits against vLLM's")
    generator = torch.Generator().manual_seed(24)
    x, weight = (
        torch.randint(-2, 3, (rows, 256), generator=generator).float().to(device)
        for rows in (65, 192)
    )
    x_scale = torch.rand((65, 2), generator=generator).to(device) + 0.5
    weight_scale = torch.rand((2, 2), generator=generator).to(device) + 0.5
    y = fp8_gemm(
        x.to(torch.float8_e4m3fn),
        x_scale,
        weight.to(torch.float8_e4m3fn),
        weight_scale,
        scale_format="fp32",
        impl=impl,
        out_dtype=torch.float32,
    )
    columns = weight_scale.repeat_interleave(128, 0)[:192]
    sums = [(x[:, part].double() @ weight[:, part].double().t()).float() for part in HALVES]
    left, right = ((x_scale[:, i, None], columns[None, :, i]) for i in (0, 1))
    terms = sums[0] * (left[0] * left[1]), sums[1] * (right[0] * right[1])
    assert_bitwise_equal(y, terms[0] + terms[1])
    apart = sums[0] * left[0] * left[1] + sums[1] * right[0] * right[1]
    assert not bitwise_equal(y, apart), "scales one after the other show"
    fused = (terms[0].double() + sums[1].double() * (right[0] * right[1]).double()).float()
    assert not bitwise_equal(y, fused), "a product joined to the sum shows"


def test_fp8_gemm_takes_scales_of_any_strides(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    weight = weights(192, 512, impl, device)
    x = hazard_activations((33, 512), seed=25, device=device)
    values, scale = quantize_rows(x, scale_format="fp32", impl=quantization_of(impl))
    options = {"scale_format": "fp32", "impl": impl}
    expected = fp8_gemm(values, scale, *weight, **options)
    for offset in (0, 1):
        # NaN between the scales; offset 1 is off a 16-byte boundary.
        rows = torch.full((33, 8), float("nan"), device=device)
        columns = torch.full((8, 35), float("nan"), device=device)
        rows[:, offset : offset + 4] = scale
        columns[:4, offset : offset + 33] = scale.t()
        for strided in (rows[:, offset : offset + 4], columns[:4, offset : offset + 33].t()):
            assert_bitwise_equal(fp8_gemm(values, strided, *weight, **options), expected)


def reversed_blocks(x: torch.Tensor, weight: Weight, impl: str) -> torch.Tensor:
    """The same layer with K's blocks in descending order: another order of additions."""
    inner = x.shape[1]
    order = torch.arange(inner, device=x.device).view(-1, 128).flip(0).reshape(-1)
    values = weight[0].view(torch.uint8)[:, order].view(torch.float8_e4m3fn)
    return run(x[:, order].contiguous(), (values, weight[1].flip(1).contiguous()), impl)


def test_control_another_order_of_blocks_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((256, 512), seed=17, device=device)
    weight = weights(192, 512, impl, device)
    assert not bitwise_equal(reversed_blocks(x, weight, impl), run(x, weight, impl))


def test_control_a_scale_of_the_whole_tensor_follows_the_batch() -> None:
    x = hazard_activations((16, 512), seed=18)
    values, scale = weights(192, 512, "reference", "cpu")
    dequantized = dequantize_blocks(values, scale)

    def per_tensor(rows: torch.Tensor) -> torch.Tensor:
        whole = rows.float().abs().amax() / 448
        quantized = (rows.float() / whole).to(torch.float8_e4m3fn).float() * whole
        return torch.cat([row @ dequantized.t() for row in quantized.split(1)])

    assert not bitwise_equal(per_tensor(x[:1]), per_tensor(x)[:1])


def test_control_a_scale_rounded_after_quantizing_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((16, 512), seed=19, device=device)
    weight = weights(192, 512, impl, device, scale_format="ue8m0")
    quantization = quantization_of(impl)
    expected = run(x, weight, impl, scale_format="ue8m0")
    values, _ = quantize_rows(x, scale_format="fp32", impl=quantization)
    _, rounded = quantize_rows(x, scale_format="ue8m0", impl=quantization)
    late = fp8_gemm(values, rounded, *weight, scale_format="ue8m0", impl=impl)
    assert not bitwise_equal(late, expected)


def test_fp8_linear_of_no_rows_is_empty(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = torch.empty((0, 512), dtype=torch.bfloat16, device=device)
    assert run(x, weights(192, 512, impl, device), impl).shape == (0, 192)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(("columns", "inner"), [(192, 512), (80, 200)])
def test_fp8_linear_grad_matches_reference(
    impl_device: tuple[str, str],
    columns: int,
    inner: int,
    scale_format: str,
    grad_dtype: torch.dtype,
) -> None:
    impl, device = impl_device
    rows = 65
    x = hazard_activations((rows, inner), seed=20, device=device)
    weight = weights(columns, inner, impl, device, scale_format=scale_format)
    grad_y = hazard_activations((rows, columns), seed=21, dtype=grad_dtype, device=device)
    x64, w64 = seen(x, weight, impl, scale_format)
    x64.requires_grad_()
    w64.requires_grad_()
    ((x64 @ w64.t()) * grad_y.double()).sum().backward()
    quantized = quantize_rows(x, scale_format=scale_format, impl=quantization_of(impl))
    grad_x, grad_weight = fp8_linear_bwd(grad_y, *quantized, *weight, impl=impl)
    assert grad_x.dtype == (torch.bfloat16 if device == "cuda" else torch.float32)
    assert grad_weight.dtype == torch.float32
    # n additions of fp32 products: (n + 2) * 2^-23 of the sum of magnitudes. The dequantized
    # factor is rounded to fp32 on CPU, to bf16 on CUDA (exact with power-of-two scales); there an
    # fp32 gradient enters as two bf16 numbers, good to 2^-16, and grad_x is rounded to bf16.
    cuda = device == "cuda"
    factor = 2**-9 if cuda and scale_format == "fp32" else 2**-24
    split = 2**-16 if cuda and grad_dtype == torch.float32 else 0.0
    g64 = grad_y.double().abs()
    magnitude_x, magnitude_w = g64 @ w64.detach().abs(), g64.t() @ x64.detach().abs()
    bound_x = magnitude_x * ((columns + 2) * 2**-23 + split + factor) * (1 + 2**-8)
    bound_x = bound_x + (x64.grad.abs() * 2**-8 if cuda else 0.0)
    bound_w = magnitude_w * ((rows + 2) * 2**-23 + split + factor) * (1 + 2**-8)
    assert bool(((grad_x.double() - x64.grad).abs() <= bound_x).all())
    assert bool(((grad_weight.double() - w64.grad).abs() <= bound_w).all())


def test_fp8_linear_bwd_computes_what_is_needed(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((3, 128), seed=22, device=device)
    weight = weights(128, 128, impl, device)
    quantized = quantize_rows(x, scale_format="fp32", impl=quantization_of(impl))
    for needs in ((True, False), (False, True)):
        grads = fp8_linear_bwd(x, *quantized, *weight, needs=needs, impl=impl)
        assert tuple(grad is not None for grad in grads) == needs


def test_dequantized_operands_are_what_the_forward_sees(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((9, 200), seed=23, device=device)
    weight = weights(80, 200, impl, device, scale_format="ue8m0")
    x64, w64 = seen(x, weight, impl, "ue8m0")
    quantized = quantize_rows(x, scale_format="ue8m0", impl=quantization_of(impl))
    assert_bitwise_equal(dequantize_rows(*quantized).double(), x64)
    assert_bitwise_equal(dequantize_blocks(*weight).double(), w64)


def test_fp8_linear_rejects_bad_inputs() -> None:
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    values, scale = weights(128, 256, "reference", "cpu")
    good = {"scale_format": "fp32", "impl": "reference"}
    for wrong in (x[None], x.int(), x.to(torch.float8_e4m3fn), x.double()):
        with pytest.raises(
            InvalidInputError, match=r"fp8_linear: x must be 2-D bf.*, got [23]-D t"
        ):
            fp8_linear(wrong, values, scale, **good)
    with pytest.raises(InvalidInputError, match="fp8_linear: weight must be on meta, got cpu"):
        fp8_linear(x.to("meta"), values, scale, **good)
    with pytest.raises(InvalidInputError, match=r"weight must be .* of shape \(N, 256\), got"):
        fp8_linear(x, values[:, :128], scale, **good)
    with pytest.raises(InvalidInputError, match="Quantize it with quantize_weight"):
        fp8_linear(x, values.float(), scale, **good)
    with pytest.raises(InvalidInputError, match=r"weight_scale must be float32 of shape \(1, 2\)"):
        fp8_linear(x, values, scale.t(), **good)
    with pytest.raises(InvalidInputError, match="weight_scale must be on cpu, got meta"):
        fp8_linear(x, values, scale.to("meta"), **good)
    with pytest.raises(InvalidInputError, match=r"out_dtype must be bfloat16, float16 or float32"):
        fp8_linear(x, values, scale, **good, out_dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=r"'e8m0' is not supported; supported: fp32, ue8m0"):
        fp8_linear(x, values, scale, scale_format="e8m0", impl="reference")
    with pytest.raises(UnsupportedError, match=r"'cutlass' .* reference, triton, deep_gemm"):
        fp8_linear(x, values, scale, scale_format="fp32", impl="cutlass")
    with pytest.raises(UnsupportedError, match=r"compute capability 0\.x.*impl 'triton'"):
        warm_up(values, scale_format="fp32", impl="deep_gemm")
    quantized = quantize_rows(x, **good)
    with pytest.raises(InvalidInputError, match=r"x_scale must be float32 of shape \(2, 2\)"):
        fp8_gemm(quantized[0], quantized[1][:1], values, scale, **good)
    with pytest.raises(InvalidInputError, match="x must be 2-D contiguous"):
        fp8_gemm(x, quantized[1], values, scale, **good)
    columns_first = quantized[0].view(torch.uint8).t().contiguous().t().view(values.dtype)
    with pytest.raises(InvalidInputError, match=r"x must be .*, got .* of strides \(1, 2\)"):
        fp8_gemm(columns_first, quantized[1], values, scale, **good)
    strided = values.view(torch.uint8).t().contiguous().t().view(values.dtype)
    with pytest.raises(InvalidInputError, match=r"weight must be contiguous, got strides \(1, 128"):
        fp8_linear(x, strided, scale, **good)
    with pytest.raises(InvalidInputError, match=r"weight_scale must be contiguous, got strides"):
        fp8_linear(x, values, scale.repeat(1, 2)[:, ::2], **good)
    with pytest.raises(InvalidInputError, match="x_scale must be on cpu, got meta"):
        fp8_gemm(quantized[0], quantized[1].to("meta"), values, scale, **good)


def test_fp8_linear_bwd_rejects_bad_inputs() -> None:
    x, x_scale = quantize_rows(
        torch.ones(2, 256, dtype=torch.bfloat16), scale_format="fp32", impl="reference"
    )
    values, scale = weights(128, 256, "reference", "cpu")
    given = {"grad_y": torch.ones(2, 128), "x": x, "x_scale": x_scale, "weight": values}
    given |= {"weight_scale": scale, "impl": "reference"}
    op = "fp8_linear_bwd: "
    for name, value, text in (
        ("grad_y", torch.ones(2, 64), r"grad_y must be .* of shape \(2, 128\) on cpu, got .*64"),
        ("grad_y", torch.ones(2, 128).int(), r"grad_y must be .*, got torch\.int32"),
        ("grad_y", torch.ones(2, 128, device="meta"), r"grad_y must be .* on cpu, got .* on meta"),
        ("x", torch.ones(2, 256), r"x must be 2-D contiguous .*, got 2-D torch\.float32"),
        ("x_scale", x_scale[:1], r"x_scale must be float32 of shape \(2, 2\), got .*\(1, 2\)"),
        ("weight", values.float(), r"weight must be .*Quantize it with quantize_weight"),
        ("weight_scale", scale[:, :1], r"weight_scale must be float32 of shape \(1, 2\)"),
        ("weight_dtype", torch.int32, r"weight_dtype must be bfloat16, float16 or float32, got"),
    ):
        with pytest.raises(InvalidInputError, match=op + text):
            fp8_linear_bwd(**(given | {name: value}))
    with pytest.raises(UnsupportedError, match=r"'cutlass' .* reference, triton, deep_gemm"):
        fp8_linear_bwd(**(given | {"impl": "cutlass"}))
