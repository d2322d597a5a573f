"""FP8 experts beside the kernels that stock vLLM chooses for them, within a stated bound."""

from __future__ import annotations

import functools

import pytest
import torch
from expert_cases import Shape, masters, tokens
from implementations import HAS_DEEP_GEMM

from consistent_kernels.fp8_experts import Fp8ExpertWeight, fp8_experts, quantize_expert_weight
from consistent_kernels.quantization import dequantize_blocks, dequantize_rows, quantize_rows

SHAPE = Shape(8, 2, 512, 256)
U, STEP = 2.0**-8, 2.0**-3
"""Half a unit of bf16; the widest distance of neighbours in e4m3, relative."""


def routing(rows: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """Every slot goes somewhere: stock code knows no -1 here."""
    generator = torch.Generator().manual_seed(1)
    score = torch.rand((rows, SHAPE.experts), generator=generator)
    weights, ids = score.topk(SHAPE.slots)
    return ids.int().to(device), (weights / weights.sum(-1, keepdim=True)).to(device)


def magnitudes(
    x: torch.Tensor,
    w13: Fp8ExpertWeight,
    w2: Fp8ExpertWeight,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """[T, H] sums of the absolute values of all terms of a token, fp64."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(SHAPE.experts):
        first, second = (
            dequantize_blocks(w.values[expert], w.scale[expert]).double().abs() for w in (w13, w2)
        )
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double().abs() @ first.T).chunk(2, dim=1)
        total.index_add_(0, token, weights[token, slot, None] * ((gate * up) @ second.T))
    return total


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_fp8_experts_agree_with_vllm_on_a_cpu(scale_format: str) -> None:
    """Stock quantizes no rows on a CPU, so tokens are values that their scales hold exactly.

    What differs: six roundings of U on either side as below, a weight times its scale to bf16 where
    that is no power of two (U each, of three weights in a term), and the hidden row, which ours
    alone rounds to e4m3: STEP / 2 of a value, and under 2^-6 of a scale half of 2^-9 scales, a
    scale being at most 2 / 448 of the row's largest.
    """
    stock = pytest.importorskip("vllm._custom_ops", reason="vLLM is not installed")
    if not hasattr(torch.ops._C, "fused_experts_cpu"):
        pytest.skip("this vLLM has no FP8 experts for CPUs")
    x = tokens(SHAPE, 33, "cpu", seed=2)
    x = dequantize_rows(*quantize_rows(x, scale_format="ue8m0", impl="reference")).bfloat16()
    ids, weights = routing(33, "cpu")
    options = {"scale_format": scale_format, "impl": "reference"}
    w13, w2 = (quantize_expert_weight(w, **options) for w in masters(SHAPE, "cpu"))
    packed = [torch.ops._C.convert_weight_packed(w.values) for w in (w13, w2)]
    method = stock.CPUQuantMethod.FP8_W8A16
    scales = (w13.scale, w2.scale, None, None, [128, 128])
    theirs = stock.fused_experts_cpu(x.clone(), *packed, weights, ids, False, method, *scales)
    expected = theirs.double()
    run = functools.partial(fp8_experts, x, w13, w2, scale_format="ue8m0", impl="reference")
    actual = run(ids, weights).double()
    size = magnitudes(x, w13, w2, ids, weights)
    small = torch.zeros_like(size)
    for expert in range(SHAPE.experts):
        first, second = (
            dequantize_blocks(w.values[expert], w.scale[expert]).double() for w in (w13, w2)
        )
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ first.T).chunk(2, dim=1)
        largest = (torch.nn.functional.silu(gate) * up).abs().amax(1) * (1 + STEP)
        floor = largest * 2 / 448 * 2.0**-10
        small.index_add_(
            0, token, weights[token, slot, None] * floor[:, None] * second.abs().sum(1)
        )
    scaled = 3 * U if scale_format == "fp32" else 0.0
    bound = (12 * U + scaled + STEP / 2) * (1 + STEP) * size + small
    assert bool(((actual - expected).abs() <= bound).all())
    # As a whole: e4m3's rounding is STEP / 2 / sqrt(3) in the mean at most, and most is below it.
    assert float((actual - expected).norm() / expected.norm()) < STEP / 2
    other = run((ids + 1) % SHAPE.experts, weights).double()
    assert float((other - expected).norm() / expected.norm()) > STEP


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's fused MoE is a CUDA kernel")
@pytest.mark.parametrize(
    "impl",
    [
        "triton",
        pytest.param(
            "deep_gemm",
            marks=pytest.mark.skipif(not HAS_DEEP_GEMM, reason="needs vLLM's CUDA wheel"),
        ),
    ],
)
@pytest.mark.parametrize("rows", [3, 64, 300])
def test_fp8_experts_agree_with_vllm(impl: str, rows: int, request: pytest.FixtureRequest) -> None:
    """Power-of-two scales, in which both quantize x alike.

    What differs is rounded: gate, up, silu, product, result and sum, six times U on either side;
    and a hidden value near a tie may be quantized to the neighbour, STEP of it. |silu(g)| <= |g|.
    The bound is of the worst case; so few values stand near a tie that the error as a whole is
    far below it.
    """
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    if not is_deep_gemm_e8m0_used():
        pytest.skip("here stock quantizes rows with fp32 scales")
    if impl == "deep_gemm":
        request.getfixturevalue("compiled")
    x = tokens(SHAPE, rows, "cuda", seed=2)
    ids, weights = routing(rows)
    w13, w2 = (
        quantize_expert_weight(w, scale_format="ue8m0", impl=impl) for w in masters(SHAPE, "cuda")
    )
    config = fp8_w8a8_moe_quant_config(
        w1_scale=w13.scale, w2_scale=w2.scale, block_shape=[128, 128]
    )
    expected = fused_experts(x, w13.values, w2.values, weights, ids, quant_config=config).double()
    actual = fp8_experts(
        x, w13, w2, ids, weights, scale_format="ue8m0", layout="fastest", impl=impl
    ).double()
    error = (actual - expected).abs()
    bound = (12 * U + STEP) * magnitudes(x, w13, w2, ids, weights)
    assert bool((error <= bound).all())
    assert float(error.norm() / expected.norm()) < STEP / 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's fused MoE is a CUDA kernel")
def test_control_another_expert_is_outside_the_bound() -> None:
    x = tokens(SHAPE, 64, "cuda", seed=2)
    ids, weights = routing(64)
    options = {"scale_format": "ue8m0", "impl": "triton"}
    w13, w2 = (quantize_expert_weight(w, **options) for w in masters(SHAPE, "cuda"))
    actual = fp8_experts(x, w13, w2, ids, weights, **options).double()
    other = fp8_experts(x, w13, w2, (ids + 1) % SHAPE.experts, weights, **options).double()
    assert float((actual - other).norm() / actual.norm()) > STEP / 4
