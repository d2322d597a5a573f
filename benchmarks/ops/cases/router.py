"""Router of Qwen3-30B-A3B, DeepSeek-V3 and V4, against the kernels of stock vLLM's routers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.router import RouterParameters, router
from consistent_kernels.router.spec import IMPLEMENTATIONS

OP = "router"
_REASON = (
    "one warp a row in Triton, each choice a pass over all experts by masks; stock's CUDA kernel "
    "shuffles candidates between lanes"
)
_MODELS = {
    "Qwen3-30B-A3B": RouterParameters(128, 8, "softmax", renormalize=True),
    "DeepSeek-V3": RouterParameters(256, 8, "sigmoid", True, 2.5, num_groups=8, top_groups=4),
    "DeepSeek-V4-Flash": RouterParameters(256, 6, "sqrtsoftplus", renormalize=True, scale=1.5),
}


def cases(setting: Setting) -> Iterator[Case]:
    """From fp32 logits to ids and weights; the gate's GEMM is measured with `linear`."""
    for name, parameters in _MODELS.items():
        rows, experts = max(setting.rows()), parameters.num_experts
        logits = setting.normal(rows, experts, seed=experts, dtype=torch.float32)
        bias = None
        if parameters.scoring != "softmax":
            bias = setting.normal(experts, seed=1, scale=0.1, dtype=torch.float32)
        for impl in setting.implementations(IMPLEMENTATIONS):
            run = functools.partial(_ours, logits, bias, parameters, impl)
            relations = functools.partial(check_rows, run, rows)
            for m in setting.rows():
                yield Case(
                    op=OP,
                    shape=f"{name} M={m} E={experts} K={parameters.top_k}",
                    impl=impl,
                    ours=functools.partial(run, slice(0, m)),
                    stock=_stock(logits[:m], bias, parameters),
                    relations=relations,
                    reason=_REASON,
                )


def _ours(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    parameters: RouterParameters,
    impl: str,
    rows: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    return router(logits[rows], bias, parameters=parameters, impl=impl)


def _stock(
    logits: torch.Tensor, bias: torch.Tensor | None, p: RouterParameters
) -> Callable[[], object]:
    """What vLLM's router_factory picks: fused_topk, fused grouped top-k, or top-k with a bias."""
    if not logits.is_cuda:
        return functools.partial(_plain_topk, logits, p.top_k)
    x = logits.new_empty((logits.shape[0], 1))
    if p.num_groups > 1:
        from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import (
            fused_grouped_topk,
        )

        return functools.partial(
            fused_grouped_topk,
            hidden_states=x,
            gating_output=logits,
            topk=p.top_k,
            renormalize=p.renormalize,
            e_score_correction_bias=bias,
            num_expert_group=p.num_groups,
            topk_group=p.top_groups,
            scoring_func=p.scoring,
            routed_scaling_factor=p.scale,
        )
    if bias is not None:
        from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import (
            fused_topk_bias,
        )

        return functools.partial(
            fused_topk_bias,
            hidden_states=x,
            gating_output=logits,
            scoring_func=p.scoring,
            e_score_correction_bias=bias,
            topk=p.top_k,
            renormalize=p.renormalize,
            routed_scaling_factor=p.scale,
        )
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    return functools.partial(fused_topk, x, logits, p.top_k, p.renormalize)


def _plain_topk(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    # vLLM's kernels for this are CUDA code.
    weights, ids = torch.softmax(logits, -1).topk(top_k)
    return weights / weights.sum(-1, keepdim=True), ids
