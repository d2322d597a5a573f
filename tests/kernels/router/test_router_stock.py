"""The router beside stock ones on the same logits: the same experts, weights within roundings."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from router_cases import MODELS, correction_bias

from consistent_kernels.router import router

ULPS = 64
"""fp32 units that two evaluations of exp, sum, division and root may differ by: an exponent's
rounding grows by |l - max| < 20, sums have up to 8 terms in another order; log1p adds a few."""

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="vLLM's fused routers are CUDA kernels"
)


def inputs(name: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits without ties: among equal scores a stock router may choose any."""
    p = MODELS[name]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn((257, p.num_experts), generator=generator) * 2.0
    return logits.to(device), correction_bias(p.num_experts, device)


def assert_close(actual: tuple, expected: tuple) -> None:
    """The same experts in any order, each with its weight within ULPS."""
    (ids, weights), (stock_weights, stock_ids) = actual, expected
    order, stock_order = ids.long().argsort(-1), stock_ids.long().argsort(-1)
    assert torch.equal(ids.long().gather(1, order), stock_ids.long().gather(1, stock_order))
    ours = weights.gather(1, order).double()
    theirs = stock_weights.float().gather(1, stock_order).double()
    assert bool(((ours - theirs).abs() <= ULPS * 2**-24 * theirs.abs()).all())


def test_router_agrees_with_transformers_qwen3_moe() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    logits, _ = inputs("qwen3", "cpu")
    gate = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
    )
    # An identity for a weight: the logits are the input.
    gate.weight.data = torch.eye(128)
    _, weights, ids = gate(logits)
    assert_close(router(logits, parameters=MODELS["qwen3"], impl="reference"), (weights, ids))


def test_router_agrees_with_transformers_deepseek_v4() -> None:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    logits, bias = inputs("deepseek-v4", "cpu")
    p = MODELS["deepseek-v4"]
    config = DeepseekV4Config(hidden_size=256, vocab_size=64)
    config.num_local_experts, config.num_experts_per_tok = 256, p.top_k
    config.routed_scaling_factor, config.scoring_func = p.scale, "sqrtsoftplus"
    gate, hashed = v4.DeepseekV4TopKRouter(config), v4.DeepseekV4HashRouter(config)
    gate.weight.data = hashed.weight.data = torch.eye(256)
    gate.e_score_correction_bias = bias
    _, weights, ids = gate(logits)
    assert_close(router(logits, bias, parameters=p, impl="reference"), (weights, ids))
    generator = torch.Generator().manual_seed(4)
    hashed.tid2eid = torch.stack([torch.randperm(256, generator=generator)[:6] for _ in range(64)])
    tokens = torch.randint(64, (257,), generator=generator)
    _, weights, ids = hashed(logits, tokens)
    ours = router(logits, parameters=p, forced=hashed.tid2eid[tokens], impl="reference")
    assert_close(ours, (weights, ids))


def test_router_agrees_with_transformers_deepseek_v3() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    logits, bias = inputs("deepseek-v3", "cpu")
    p = MODELS["deepseek-v3"]
    config = DeepseekV3Config(hidden_size=8, moe_intermediate_size=8)
    with torch.device("meta"):
        layer = DeepseekV3MoE(config)
    layer.gate.e_score_correction_bias = bias
    ids, weights = layer.route_tokens_to_experts(logits)
    assert_close(router(logits, bias, parameters=p, impl="reference"), (weights, ids))


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_router_agrees_with_vllm_grouped_topk_on_a_cpu(name: str) -> None:
    module = pytest.importorskip(
        "vllm.model_executor.layers.fused_moe.cpu_fused_moe", reason="vLLM is not installed"
    )
    p = MODELS[name]
    logits, bias = inputs(name, "cpu")
    bias = bias if name == "deepseek-v3" else None
    stock = module.grouped_topk(
        hidden_states=logits,
        gating_output=logits,
        topk=p.top_k,
        renormalize=p.renormalize,
        num_expert_group=p.num_groups,
        topk_group=p.top_groups,
        scoring_func=p.scoring,
        routed_scaling_factor=p.scale,
        e_score_correction_bias=bias,
    )
    ours = router(logits, bias, parameters=p, impl="reference")
    assert_close(ours, stock)
    # One unit more than the bound allows, and one expert for another, are both seen.
    with pytest.raises(AssertionError):
        assert_close((ours[0], ours[1] * (1 + 2 * ULPS * 2**-24)), stock)
    ungrouped = dataclasses.replace(p, num_groups=1, top_groups=1)
    with pytest.raises(AssertionError):
        assert_close(router(logits, bias, parameters=ungrouped, impl="reference"), stock)


@pytest.mark.gpu
@needs_cuda
def test_router_agrees_with_vllm_fused_topk() -> None:
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    logits, _ = inputs("qwen3", "cuda")
    weights, ids, _ = fused_topk(logits, logits, 8, renormalize=True)
    assert_close(router(logits, parameters=MODELS["qwen3"], impl="triton"), (weights, ids))


@pytest.mark.gpu
@needs_cuda
def test_router_agrees_with_vllm_grouped_topk() -> None:
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import (
        fused_grouped_topk,
    )

    p = MODELS["deepseek-v3"]
    logits, bias = inputs("deepseek-v3", "cuda")
    stock = fused_grouped_topk(
        hidden_states=logits,
        gating_output=logits,
        topk=p.top_k,
        renormalize=True,
        e_score_correction_bias=bias,
        num_expert_group=p.num_groups,
        topk_group=p.top_groups,
        scoring_func="sigmoid",
        routed_scaling_factor=p.scale,
    )
    assert_close(router(logits, bias, parameters=p, impl="triton"), stock)


@pytest.mark.gpu
@needs_cuda
def test_router_agrees_with_vllm_sqrtsoftplus() -> None:
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import (
        fused_topk_bias,
    )

    p = MODELS["deepseek-v4"]
    logits, bias = inputs("deepseek-v4", "cuda")
    stock = fused_topk_bias(
        hidden_states=logits,
        gating_output=logits,
        scoring_func="sqrtsoftplus",
        e_score_correction_bias=bias,
        topk=p.top_k,
        renormalize=True,
        routed_scaling_factor=p.scale,
    )
    assert_close(router(logits, bias, parameters=p, impl="triton"), stock)
