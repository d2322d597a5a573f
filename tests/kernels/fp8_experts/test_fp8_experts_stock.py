"""FP8 experts beside the kernel that stock vLLM chooses for them, within a stated bound."""

from __future__ import annotations

import pytest
import torch
from expert_cases import Shape, masters, tokens
from implementations import HAS_DEEP_GEMM

from consistent_kernels.fp8_experts import Fp8ExpertWeight, fp8_experts, quantize_expert_weight
from consistent_kernels.quantization import dequantize_blocks

SHAPE = Shape(8, 2, 512, 256)
U, STEP = 2.0**-8, 2.0**-3
"""Half a unit of bf16; the widest distance of neighbours in e4m3, relative."""


def routing(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every slot goes somewhere: stock code knows no -1 here."""
    generator = torch.Generator().manual_seed(1)
    score = torch.rand((rows, SHAPE.experts), generator=generator)
    weights, ids = score.topk(SHAPE.slots)
    return ids.int().cuda(), (weights / weights.sum(-1, keepdim=True)).cuda()


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
