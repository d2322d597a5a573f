"""What vLLM's and verl's quantization give on the same inputs: equal bits, or the difference."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path

import pytest
import torch
from interpreted import output_interpreted

from consistent_kernels.quantization import quantize_rows, quantize_weight
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def verl_module() -> types.ModuleType:
    """Load verl's kernel file alone: the package imports for seconds and is not needed."""
    package = importlib.util.find_spec("verl")
    if package is None:
        pytest.skip("verl is not installed")
    path = Path(package.submodule_search_locations[0]) / "utils" / "kernel" / "fp8_kernel.py"
    spec = importlib.util.spec_from_file_location("verl_fp8_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights(device: str = "cpu") -> torch.Tensor:
    """bf16 weights of ragged shape, every block's maximum above DeepGEMM's floor of 1e-4."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.logspace(-2, 0, 300)
    return (torch.randn(400, 300, generator=generator) * scale).bfloat16().to(device)


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many float8 numbers apart; the bytes of one sign ascend as the numbers do."""
    a, b = (x.view(torch.uint8).int() for x in (a, b))
    return torch.where((a ^ b) < 128, (a - b).abs(), (a & 127) + (b & 127))


def assert_close_to_one_rounding(
    actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Scales two units of fp32 apart at most, values one float8 step, few of them."""
    ratio = actual[1].double() / expected[1].double()
    assert bool(((ratio - 1).abs() <= 2**-22).all())
    steps = steps_apart(actual[0], expected[0])
    assert int(steps.max()) <= 1
    assert float((steps > 0).double().mean()) < 1e-2


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_weights_equal_vllm_per_block_cast(scale_format: str) -> None:
    module = pytest.importorskip("vllm.utils.deep_gemm", reason="vLLM is not installed")
    stock = module.per_block_cast_to_fp8._torchdynamo_orig_callable
    weight = weights()
    theirs = stock(weight, use_ue8m0=scale_format == "ue8m0")
    ours = quantize_weight(weight, scale_format=scale_format, impl="reference")
    for actual, expected in zip(theirs, ours, strict=True):
        assert_bitwise_equal(actual, expected)
    # Its floor of the maximum is 1e-4 (ours, as verl's, 1e-10): smaller blocks lose their values.
    theirs = stock(weight * 1e-6, use_ue8m0=scale_format == "ue8m0")
    ours = quantize_weight(weight * 1e-6, scale_format=scale_format, impl="reference")
    assert not bitwise_equal(theirs[0], ours[0])


def test_weights_are_one_rounding_from_verl_pytorch() -> None:
    module = verl_module()
    weight = weights()
    values, scale = module._scaled_fp8_blockwise_pytorch(weight, [128, 128])
    ours = quantize_weight(weight, scale_format="fp32", impl="reference")
    # It multiplies by 448 / amax and sends 1 / (448 / amax): one rounding more than amax / 448.
    theirs = values, scale.view(ours[1].shape)
    assert not bitwise_equal(theirs[1], ours[1])
    assert_close_to_one_rounding(theirs, ours)
    _, scale = module._scaled_fp8_blockwise_pytorch(weight * 0, [128, 128])
    assert scale.unique().tolist() == [1.0], "and a block of zeros has scale 1"


_VERL_TRITON = """
import sys
import torch
sys.path.insert(0, {folder!r})
from test_stock import verl_module, weights
from consistent_kernels.quantization import quantize_weight
from consistent_kernels.testing import assert_bitwise_equal

for weight in (weights(), weights() * 1e-6, weights() * 0):
    _, scale = verl_module().scaled_fp8_blockwise_triton(weight, [128, 128])
    ours = quantize_weight(weight, scale_format="fp32", impl="reference")
    assert_bitwise_equal(scale, ours[1])
print("done")
"""


def test_weight_scales_equal_verl_triton_with_exact_divisions() -> None:
    verl_module()
    assert output_interpreted(_VERL_TRITON.format(folder=str(Path(__file__).parent))).endswith(
        "done\n"
    )


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_rows_equal_vllm_quant_fp8_on_a_cpu(scale_format: str) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import GroupShape, QuantFP8

    with set_current_vllm_config(VllmConfig()):
        stock = QuantFP8(
            static=False, group_shape=GroupShape(1, 128), use_ue8m0=scale_format == "ue8m0"
        )
    x = hazard_activations((65, 300), seed=6)
    for theirs, ours in zip(
        stock.forward_native(x),
        quantize_rows(x, scale_format=scale_format, impl="reference"),
        strict=True,
    ):
        assert_bitwise_equal(theirs.contiguous(), ours)
    # This form of stock's floors a scale at 1 / (448 * 512), its CUDA kernel (and ours) far below.
    small = x * 1e-6
    theirs, _ = stock.forward_native(small)
    ours, _ = quantize_rows(small, scale_format=scale_format, impl="reference")
    assert not bitwise_equal(theirs.contiguous(), ours)


@pytest.mark.gpu
@needs_cuda
def test_weights_are_one_rounding_from_verl_triton() -> None:
    # On a GPU its `/` is an approximate division, up to two units of fp32 off.
    weight = weights("cuda")
    theirs = verl_module().scaled_fp8_blockwise_triton(weight, [128, 128])
    assert_close_to_one_rounding(
        theirs, quantize_weight(weight, scale_format="fp32", impl="triton")
    )


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_weights_against_vllm_compiled_per_block_cast(scale_format: str) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = weights("cuda")
    theirs = per_block_cast_to_fp8(weight, use_ue8m0=scale_format == "ue8m0")
    ours = quantize_weight(weight, scale_format=scale_format, impl="triton")
    if scale_format == "ue8m0":
        for actual, expected in zip(theirs, ours, strict=True):
            assert_bitwise_equal(actual, expected)
    else:
        assert_close_to_one_rounding(theirs, ours)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("tma_aligned", [False, True])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("rows", [1, 7, 64, 257])
def test_rows_equal_vllm_per_token_group_quant(
    rows: int, scale_format: str, tma_aligned: bool
) -> None:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    x = hazard_activations((rows, 2048), seed=2, device="cuda")
    x[0, :128] = 0.0
    theirs = per_token_group_quant_fp8(
        x,
        128,
        column_major_scales=tma_aligned,
        tma_aligned_scales=tma_aligned,
        use_ue8m0=scale_format == "ue8m0",
    )
    ours = quantize_rows(x, scale_format=scale_format, impl="triton", tma_aligned=tma_aligned)
    for actual, expected in zip(ours, theirs, strict=True):
        assert_bitwise_equal(actual, expected)
        assert actual.stride() == expected.stride()
