"""The experts beside the stock ones on the same inputs, within a stated rounding bound."""

from __future__ import annotations

import pytest
import torch
from expert_cases import SHAPES, masters, tokens

from consistent_kernels.experts import experts, prepare_expert_weight

SHAPE = SHAPES["qwen3-like"]
U = 2.0**-8


def routing(rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every slot goes somewhere: stock code knows no -1 here."""
    generator = torch.Generator().manual_seed(1)
    score = torch.rand((rows, SHAPE.experts), generator=generator)
    weights, ids = score.topk(SHAPE.slots)
    return ids.int().to(device), (weights / weights.sum(-1, keepdim=True)).to(device)


def bound(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, device: str) -> torch.Tensor:
    """What the roundings of both sides can amount to.

    A term of a slot passes at most six roundings of U on either side (gate, up, silu, their
    product, the result, its weighted sum): 12 U of the sum of magnitudes.
    """
    w13, w2 = (w.bfloat16().double().abs() for w in masters(SHAPE, device))
    total = torch.zeros((x.shape[0], SHAPE.hidden), dtype=torch.float64, device=device)
    for row in range(x.shape[0]):
        for slot in range(SHAPE.slots):
            expert = int(ids[row, slot])
            gate, up = (w13[expert] @ x[row].double().abs()).chunk(2)
            total[row] += float(weights[row, slot]) * (w2[expert] @ (gate * up))
    return 12 * U * total


def test_experts_agree_with_transformers() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    x = tokens(SHAPE, 33, "cpu", seed=2)
    ids, weights = routing(33, "cpu")
    w13, w2 = masters(SHAPE, "cpu")
    config = Qwen3MoeConfig(
        hidden_size=SHAPE.hidden,
        num_experts=SHAPE.experts,
        moe_intermediate_size=SHAPE.width,
        num_experts_per_tok=SHAPE.slots,
    )
    config._experts_implementation = "eager"
    stock = Qwen3MoeExperts(config).bfloat16()
    stock.gate_up_proj.data, stock.down_proj.data = w13.bfloat16(), w2.bfloat16()
    with torch.no_grad():
        expected = stock(x, ids.long(), weights)
    prepared = [prepare_expert_weight(w, dtype=x.dtype, impl="reference") for w in (w13, w2)]
    actual = experts(x, *prepared, ids, weights, impl="reference")
    error = (actual.double() - expected.double()).abs()
    assert bool((error <= bound(x, ids, weights, "cpu")).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's fused MoE is a CUDA kernel")
def test_experts_agree_with_vllm_fused_experts() -> None:
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    x = tokens(SHAPE, 33, "cuda", seed=2)
    ids, weights = routing(33, "cuda")
    w13, w2 = (
        prepare_expert_weight(w, dtype=x.dtype, impl="triton") for w in masters(SHAPE, "cuda")
    )
    expected = fused_experts(x, w13, w2, weights, ids)
    actual = experts(x, w13, w2, ids, weights, impl="triton")
    error = (actual.double() - expected.double()).abs()
    assert bool((error <= bound(x, ids, weights, "cuda")).all())
