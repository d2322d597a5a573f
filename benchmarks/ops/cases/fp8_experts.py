"""FP8 experts of Qwen3-30B-A3B, against vLLM's DeepGEMM experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.fp8_experts import (
    Fp8ExpertWeight,
    fp8_experts,
    quantize_expert_weight,
)
from consistent_kernels.fp8_experts.spec import IMPLEMENTATIONS

OP = "fp8_experts"
_SHAPE = (128, 8, 2048, 768)
_SMALL = (8, 2, 128, 128)
"""Experts E, experts of a token K, hidden H, width I."""
_SCALE_FORMAT = "ue8m0"
"""What stock vLLM uses with DeepGEMM on Hopper."""
_REASONS = {
    "reference": "vLLM has no kernel for it on a CPU",
    "triton": "the program for shapes that DeepGEMM does not take, with one tile for any counts",
    "deep_gemm": None,
}


def cases(setting: Setting) -> Iterator[Case]:
    """Routed rows to their weighted sum: quantization, layout, both GEMMs, activation, sum."""
    num_experts, top_k, hidden, width = _SMALL if setting.small else _SHAPE
    rows = max(setting.rows())
    x = setting.hazards(rows, hidden, seed=1)
    masters = (
        setting.normal(num_experts, 2 * width, hidden, seed=2, scale=0.02),
        setting.normal(num_experts, hidden, width, seed=3, scale=0.02),
    )
    weights, ids = setting.normal(rows, num_experts, seed=4).float().softmax(-1).topk(top_k)
    ids = ids.int()
    for impl in setting.implementations(IMPLEMENTATIONS):
        w13, w2 = (
            quantize_expert_weight(master, scale_format=_SCALE_FORMAT, impl=impl)
            for master in masters
        )
        run = functools.partial(_ours, x, w13, w2, ids, weights, impl)
        relations = functools.partial(check_rows, run, rows, (1, 7, 64, 257))
        for m in setting.rows():
            yield Case(
                op=OP,
                shape=f"M={m} E={num_experts} K={top_k} H={hidden} I={width} {_SCALE_FORMAT}",
                impl=impl,
                ours=functools.partial(run, slice(0, m)),
                stock=_stock(x[:m], w13, w2, ids[:m], weights[:m]) if x.is_cuda else None,
                relations=relations,
                reason=_REASONS[impl],
            )


def _ours(
    x: torch.Tensor,
    w13: Fp8ExpertWeight,
    w2: Fp8ExpertWeight,
    ids: torch.Tensor,
    weights: torch.Tensor,
    impl: str,
    rows: slice,
) -> torch.Tensor:
    return fp8_experts(
        x[rows], w13, w2, ids[rows], weights[rows], scale_format=_SCALE_FORMAT, impl=impl
    )


def _stock(
    x: torch.Tensor,
    w13: Fp8ExpertWeight,
    w2: Fp8ExpertWeight,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
        fp8_w8a8_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
        MoEPrepareAndFinalizeNoDPEPModular,
    )
    from vllm.v1.worker.workspace import (
        init_workspace_manager,
        is_workspace_manager_initialized,
    )

    if not is_workspace_manager_initialized():
        init_workspace_manager(x.device)
    num_experts, hidden, width = w2.values.shape
    config = FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=ids.shape[1],
        hidden_dim=hidden,
        intermediate_size=width,
        num_local_experts=num_experts,
        num_logical_experts=num_experts,
        activation=MoEActivation.SILU,
        device=x.device,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=x.dtype,
    )
    quantization = fp8_w8a8_moe_quant_config(
        w1_scale=w13.scale, w2_scale=w2.scale, block_shape=[128, 128]
    )
    kernel = modular_kernel.FusedMoEKernel(
        MoEPrepareAndFinalizeNoDPEPModular(), DeepGemmExperts(config, quantization)
    )
    return functools.partial(
        kernel.apply,
        x,
        w13.values,
        w2.values,
        weights,
        ids,
        MoEActivation.SILU,
        num_experts,
        None,
        False,
    )
