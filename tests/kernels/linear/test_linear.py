"""Relations of linear: rows alone and together, columns fused and separate, against fp64."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.linear import linear, linear_bwd, prepare_weight
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    poisoned_rows,
    split_k_linear,
)

SHAPES = ((192, 576), (576, 1536), (128, 64), (80, 200), (17, 33))
"""(N, K): model shapes, and some that are no multiple of any tile."""


def weights(columns: int, inner: int, device: str, *, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(columns, inner, generator=generator) * 0.05).to(device)


def biases(columns: int, device: str, *, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(columns, generator=generator).bfloat16().to(device)


def run(
    x: torch.Tensor,
    master: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    impl: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    weight = prepare_weight(master, dtype=x.dtype, impl=impl, out_dtype=out_dtype)
    return linear(x, weight, bias, impl=impl, out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_linear_matches_reference(
    impl_device: tuple[str, str], columns: int, inner: int, out_dtype: torch.dtype
) -> None:
    impl, device = impl_device
    x = hazard_activations((65, inner), seed=1, device=device)
    master, bias = weights(columns, inner, device), biases(columns, device)
    y = run(x, master, bias, impl=impl, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    x64, w64, b64 = x.double(), master.bfloat16().double(), bias.double()
    exact = x64 @ w64.t() + b64
    # inner + 1 fp32 additions of exact products, each off by at most 2^-24 of the magnitude of
    # the sum so far (2^-23 on hardware that truncates), then one rounding of the result.
    magnitude = x64.abs() @ w64.abs().t() + b64.abs()
    rounding = 2**-8 if out_dtype == torch.bfloat16 else 0.0
    bound = magnitude * (inner + 1) * 2**-23 * (1 + rounding) + exact.abs() * rounding
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_linear_is_batch_invariant(
    impl_device: tuple[str, str], columns: int, inner: int, out_dtype: torch.dtype
) -> None:
    impl, device = impl_device
    x = hazard_activations((1100, inner), seed=4, device=device)
    weight = prepare_weight(
        weights(columns, inner, device), dtype=x.dtype, impl=impl, out_dtype=out_dtype
    )
    bias = biases(columns, device)
    whole = linear(x, weight, bias, impl=impl, out_dtype=out_dtype)
    for rows in (*BATCH_SIZES, 1024):
        for start in {0, 5, 1100 - rows}:
            part = slice(start, start + rows)
            y = linear(x[part], weight, bias, impl=impl, out_dtype=out_dtype)
            assert_bitwise_equal(y, whole[part], f"rows {start} to {start + rows} of 1100")


def test_linear_ignores_row_position(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((37, 576), seed=5, device=device)
    master = weights(192, 576, device)
    expected = run(x, master, impl=impl)
    for seed in range(8):
        order = torch.randperm(37, generator=torch.Generator().manual_seed(seed)).to(device)
        assert_bitwise_equal(run(x[order], master, impl=impl), expected[order])


@pytest.mark.parametrize("offset", [1, 3, 8, 31])
def test_linear_ignores_memory_alignment(impl_device: tuple[str, str], offset: int) -> None:
    impl, device = impl_device
    x = hazard_activations((20, 576), seed=6, device=device)
    weight = prepare_weight(weights(192, 576, device), dtype=x.dtype, impl=impl)
    moved_x = torch.empty(20 * 576 + offset, dtype=x.dtype, device=device)[offset:].view(20, 576)
    moved_w = torch.empty(192 * 576 + offset, dtype=weight.dtype, device=device)[offset:]
    moved_w = moved_w.view(192, 576)
    moved_x.copy_(x)
    moved_w.copy_(weight)
    expected = linear(x, weight, impl=impl)
    assert_bitwise_equal(linear(moved_x, weight, impl=impl), expected)
    assert_bitwise_equal(linear(x, moved_w, impl=impl), expected)


def test_linear_takes_strided_rows(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    wide = hazard_activations((20, 3 * 192), seed=7, device=device)
    master = weights(128, 192, device)
    view = wide[:, 192:384]
    assert_bitwise_equal(run(view, master, impl=impl), run(view.contiguous(), master, impl=impl))


@pytest.mark.parametrize("parts", [(576, 192, 192), (1536, 1536), (64, 128), (64,) * 5])
@pytest.mark.parametrize("rows", [1, 7, 16, 33, 256])
def test_linear_fused_columns_equal_separate(
    impl_device: tuple[str, str], parts: tuple[int, ...], rows: int
) -> None:
    impl, device = impl_device
    x = hazard_activations((rows, 576), seed=8, device=device)
    masters = [weights(size, 576, device, seed=20 + i) for i, size in enumerate(parts)]
    fused = run(x, torch.cat(masters), impl=impl)
    separate = torch.cat([run(x, master, impl=impl) for master in masters], dim=1)
    assert_bitwise_equal(fused, separate)


@pytest.mark.parametrize("chunk", [1024, 2048, 4096])
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_linear_vocabulary_chunks_equal_whole(
    impl_device: tuple[str, str], chunk: int, rows: int
) -> None:
    impl, device = impl_device
    vocab, hidden = 5 * 1024 + 40, 192
    x = hazard_activations((rows, hidden), seed=9, device=device)
    master = weights(vocab, hidden, device)
    whole = run(x, master, impl=impl, out_dtype=torch.float32)
    chunks = [run(x, part, impl=impl, out_dtype=torch.float32) for part in master.split(chunk)]
    assert_bitwise_equal(torch.cat(chunks, dim=1), whole)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_rounds_its_fp32_result_once(impl_device: tuple[str, str], has_bias: bool) -> None:
    impl, device = impl_device
    if impl == "onednn":
        pytest.skip("oneDNN's bf16 and fp32 results come from two GEMMs; fp64 checks both")
    x = hazard_activations((33, 576), seed=10, device=device)
    master = weights(192, 576, device)
    bias = biases(192, device) if has_bias else None
    fp32 = run(x, master, bias, impl=impl, out_dtype=torch.float32)
    assert_bitwise_equal(run(x, master, bias, impl=impl), fp32.to(x.dtype))


def test_control_bias_after_the_rounding_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((33, 576), seed=11, device=device)
    master, bias = weights(192, 576, device), biases(192, device)
    twice = run(x, master, impl=impl) + bias
    assert not bitwise_equal(twice, run(x, master, bias, impl=impl))


def test_linear_ignores_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((9, 576), seed=12, device=device)
    master = weights(192, 576, device)
    expected = run(x, master, impl=impl)
    buffer, rows = poisoned_rows(x, before=3, after=4)
    assert_bitwise_equal(run(buffer, master, impl=impl)[rows], expected)
    assert_bitwise_equal(run(buffer[rows], master, impl=impl), expected)
    # K = 200 leaves masked lanes behind each row; NaN stands there in this view.
    gaps = torch.full((9, 256), float("nan"), dtype=x.dtype, device=device)
    gaps[:, :200] = x[:, :200]
    narrow = master[:, :200].contiguous()
    assert_bitwise_equal(
        run(gaps[:, :200], narrow, impl=impl), run(x[:, :200].contiguous(), narrow, impl=impl)
    )


def test_linear_is_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((129, 576), seed=13, device=device)
    weight = prepare_weight(weights(192, 576, device), dtype=x.dtype, impl=impl)
    first = linear(x, weight, impl=impl)
    for _ in range(20):
        assert_bitwise_equal(linear(x, weight, impl=impl), first)


def test_control_split_k_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((256, 576), seed=14, device=device)
    master = weights(192, 576, device)
    assert not bitwise_equal(
        split_k_linear(x, master.bfloat16(), splits=4), run(x, master, impl=impl)
    )


def test_control_stock_gemm_follows_the_batch() -> None:
    x = hazard_activations((64, 576), seed=15, dtype=torch.float32)
    master = weights(192, 576, "cpu")
    whole = torch.nn.functional.linear(x, master)
    alone = torch.cat([torch.nn.functional.linear(x[i : i + 1], master) for i in range(64)])
    assert not bitwise_equal(alone, whole)


def test_linear_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((17, 192), seed=16, device=device)
    weight = prepare_weight(weights(192, 192, device), dtype=x.dtype, impl=impl)

    def two_layers(value: torch.Tensor) -> torch.Tensor:
        return linear(linear(value, weight, impl=impl), weight, impl=impl)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(two_layers, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(x), two_layers(x))


def test_linear_of_no_rows_is_empty(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = torch.empty((0, 192), dtype=torch.bfloat16, device=device)
    assert run(x, weights(64, 192, device), impl=impl).shape == (0, 64)


def test_prepare_weight_rounds_to_nearest_even(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    # 1 + 2^-8 lies halfway between two bf16 numbers, 1 + 3 * 2^-8 too: ties go to even.
    tie = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0]], device=device)
    expected = torch.tensor([[1.0, 1 + 2**-6, 1 + 2**-7, -0.0]], device=device)
    for out_dtype in (None, torch.float32):
        prepared = prepare_weight(tie, dtype=torch.bfloat16, impl=impl, out_dtype=out_dtype)
        assert_bitwise_equal(prepared.float(), expected)
    again = prepare_weight(expected.bfloat16(), dtype=torch.bfloat16, impl=impl)
    assert_bitwise_equal(again.float(), expected)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("columns", "inner"), [(192, 576), (80, 200)])
def test_linear_grad_matches_reference(
    impl_device: tuple[str, str], columns: int, inner: int, grad_dtype: torch.dtype
) -> None:
    impl, device = impl_device
    rows = 65
    x = hazard_activations((rows, inner), seed=17, device=device)
    grad_y = hazard_activations((rows, columns), seed=18, dtype=grad_dtype, device=device)
    out_dtype = None if grad_dtype == torch.bfloat16 else torch.float32
    weight = prepare_weight(
        weights(columns, inner, device), dtype=x.dtype, impl=impl, out_dtype=out_dtype
    )
    x64 = x.double().requires_grad_()
    w64 = weight.double().requires_grad_()
    b64 = torch.zeros(columns, dtype=torch.float64, device=device, requires_grad=True)
    ((x64 @ w64.t() + b64) * grad_y.double()).sum().backward()
    grad_x, grad_weight, grad_bias = linear_bwd(grad_y, x, weight, impl=impl)
    assert grad_x.dtype == x.dtype
    assert grad_weight.dtype == torch.float32
    assert grad_bias.dtype == torch.float32
    # n fp32 additions of products (exact for bf16 factors, rounded once for fp32 ones): below
    # (n + 1) * 2^-23 of the sum of magnitudes; grad_x is then rounded to bf16. On CUDA an fp32
    # gradient enters as two bf16 numbers, good to 2^-16.
    g64 = grad_y.double().abs()
    split = 2**-16 if device == "cuda" and grad_dtype == torch.float32 else 0.0
    bound_x = g64 @ w64.detach().abs() * ((columns + 2) * 2**-23 + split) * (1 + 2**-8)
    bound_w = g64.t() @ x64.detach().abs() * ((rows + 2) * 2**-23 + split)
    bound_b = g64.sum(0) * (rows + 1) * 2**-23
    assert bool(((grad_x - x64.grad).abs() <= bound_x + x64.grad.abs() * 2**-8).all())
    assert bool(((grad_weight - w64.grad).abs() <= bound_w).all())
    assert bool(((grad_bias - b64.grad).abs() <= bound_b).all())


def test_linear_bwd_computes_what_is_needed(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = hazard_activations((3, 64), seed=19, device=device)
    weight = prepare_weight(weights(64, 64, device), dtype=x.dtype, impl=impl)
    grads = linear_bwd(x, x, weight, needs=(False, True, False), impl=impl)
    assert [grad is None for grad in grads] == [True, False, True]


def test_linear_rejects_bad_inputs() -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    weight = torch.zeros(64, 8)
    with pytest.raises(InvalidInputError, match=r"linear: x must be 2-D .*, got 3-D"):
        linear(x[None], weight, impl="reference")
    with pytest.raises(InvalidInputError, match=r"linear: x must be 2-D .*int32"):
        linear(x.int(), weight, impl="reference")
    with pytest.raises(InvalidInputError, match=r"weight must be of shape \(N, 8\), got \(64, 7\)"):
        linear(x, weight[:, :7], impl="reference")
    with pytest.raises(InvalidInputError, match="Pass it through prepare_weight"):
        linear(x, weight.bfloat16(), impl="reference")
    with pytest.raises(InvalidInputError, match="Pass it through prepare_weight"):
        linear(x, weight, impl="triton")
    with pytest.raises(InvalidInputError, match="contiguous=False"):
        linear(x, torch.zeros(8, 64).t(), impl="reference")
    with pytest.raises(InvalidInputError, match=r"bias must be torch.bfloat16 of shape \(64,\)"):
        linear(x, weight, torch.zeros(64), impl="reference")
    with pytest.raises(InvalidInputError, match=r"out_dtype must be torch\.bfloat16"):
        linear(x, weight, impl="reference", out_dtype=torch.float16)
    with pytest.raises(InvalidInputError, match=r"grad_y must be of shape \(2, 64\)"):
        linear_bwd(x, x, weight, impl="reference")
    with pytest.raises(UnsupportedError, match="impl 'mkl' is not supported; supported: reference"):
        linear(x, weight, impl="mkl")
    with pytest.raises(UnsupportedError, match="impl 'mkl'"):
        prepare_weight(weight, dtype=torch.bfloat16, impl="mkl")
