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


def agree(
    actual: torch.Tensor, expected: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> bool:
    """Whether each element is within the bound, and the error as a whole too.

    The bound is of the worst case, in which nothing cancels. As a whole, twelve roundings, each
    U / sqrt(3) of the root mean square, add up to 2 U.
    """
    x = tokens(SHAPE, 33, actual.device.type, seed=2)
    error = actual.double() - expected.double()
    inside = bool((error.abs() <= bound(x, ids, weights, actual.device.type)).all())
    return inside and float(error.norm() / expected.double().norm()) < 2 * U


def test_control_another_weight_of_a_slot_does_not_agree() -> None:
    x = tokens(SHAPE, 33, "cpu", seed=2)
    ids, weights = routing(33, "cpu")
    prepared = [
        prepare_expert_weight(w, dtype=x.dtype, impl="reference") for w in masters(SHAPE, "cpu")
    ]
    out = experts(x, *prepared, ids, weights, impl="reference")
    swapped = experts(x, *prepared, ids, weights.flip(1), impl="reference")
    assert agree(out, out, ids, weights)
    assert not agree(swapped, out, ids, weights)


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
    assert agree(actual, expected, ids, weights)


def test_experts_agree_with_vllm_on_a_cpu() -> None:
    module = pytest.importorskip(
        "vllm.model_executor.layers.fused_moe.cpu_fused_moe", reason="vLLM is not installed"
    )
    if not hasattr(torch.ops._C, "prepack_moe_weight"):
        pytest.skip("this vLLM has no experts for CPUs")
    x = tokens(SHAPE, 33, "cpu", seed=2)
    ids, weights = routing(33, "cpu")
    layer = torch.nn.Module()
    for name, master in zip(("w13_weight", "w2_weight"), masters(SHAPE, "cpu"), strict=True):
        setattr(layer, name, torch.nn.Parameter(master.bfloat16(), requires_grad=False))
    stock = module.CPUFusedMOE(layer)
    silu = module.MoEActivation.SILU
    expected = stock.forward_method(layer, x.clone(), weights, ids, silu, SHAPE.experts)
    prepared = [
        prepare_expert_weight(w, dtype=x.dtype, impl="reference") for w in masters(SHAPE, "cpu")
    ]
    actual = experts(x, *prepared, ids, weights, impl="reference")
    assert agree(actual, expected, ids, weights)


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
    assert agree(actual, expected, ids, weights)
