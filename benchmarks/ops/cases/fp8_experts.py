"""FP8 experts of Qwen3-30B-A3B, against the kernel that vLLM chooses for them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.deep_gemm_start import prepare
from consistent_kernels.fp8_experts import (
    Fp8ExpertWeight,
    fp8_experts,
    quantize_expert_weight,
)
from consistent_kernels.fp8_experts.spec import IMPLEMENTATIONS
from consistent_kernels.quantization.spec import SCALE_FORMATS

OP = "fp8_experts"
_SHAPE = (128, 8, 2048, 768)
_SMALL = (8, 2, 128, 128)
"""Experts E, experts of a token K, hidden H, width I."""
_REASONS = {
    "reference": "vLLM has no kernel for it on a CPU",
    "triton": "the program for shapes that DeepGEMM does not take, with one tile for any counts",
    "deep_gemm": "few rows an expert: layout, quantization and the sum in slot order are launches "
    "around the two GEMMs that stock's Triton kernels do inside",
}


def cases(setting: Setting) -> Iterator[Case]:
    """Routed rows to their weighted sum: quantization, layout, both GEMMs, activation, sum."""
    num_experts, top_k, hidden, width = _SMALL if setting.small else _SHAPE
    rows = max(setting.rows())
    if setting.device == "cuda":
        # Else DeepGEMM compiles one kernel after the other, each for seconds.
        from consistent_kernels.fp8_experts.deep_gemm_start import layer_shapes

        device = torch.device("cuda", torch.cuda.current_device())
        sizes = (num_experts, hidden, width, rows * top_k)
        prepare((shape for f in SCALE_FORMATS for shape in layer_shapes(*sizes, f)), device)
    x = setting.hazards(rows, hidden, seed=1)
    masters = (
        setting.normal(num_experts, 2 * width, hidden, seed=2, scale=0.02),
        setting.normal(num_experts, hidden, width, seed=3, scale=0.02),
    )
    weights, ids = setting.normal(rows, num_experts, seed=4).float().softmax(-1).topk(top_k)
    ids = ids.int()
    # What is chosen where both serve comes first: a run that is cut off has it.
    impls = setting.implementations(reversed(IMPLEMENTATIONS))
    for scale_format in SCALE_FORMATS:
        for impl in impls:
            w13, w2 = (
                quantize_expert_weight(master, scale_format=scale_format, impl=impl)
                for master in masters
            )
            run = functools.partial(_ours, x, w13, w2, ids, weights, scale_format, impl)
            relations = functools.partial(check_rows, run, rows, (1, 7, 64, 256, 257))
            for m in setting.rows():
                yield Case(
                    op=OP,
                    shape=f"M={m} E={num_experts} K={top_k} H={hidden} I={width} {scale_format}",
                    impl=impl,
                    ours=functools.partial(run, slice(0, m)),
                    stock=stock_experts(x[:m], w13, w2, ids[:m], weights[:m])
                    if x.is_cuda
                    else None,
                    relations=relations,
                    reason=_REASONS[impl],
                )


def _ours(
    x: torch.Tensor,
    w13: Fp8ExpertWeight,
    w2: Fp8ExpertWeight,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scale_format: str,
    impl: str,
    rows: slice,
) -> torch.Tensor:
    options = {"scale_format": scale_format, "layout": "fastest", "impl": impl}
    return fp8_experts(x[rows], w13, w2, ids[rows], weights[rows], **options)


def stock_experts(
    x: torch.Tensor,
    w13: Fp8ExpertWeight,
    w2: Fp8ExpertWeight,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    """vLLM's kernel for block-FP8 experts on this device: on Hopper its Triton one, tuned for H200.

    It quantizes rows with power-of-two scales, whatever the weights have.
    """
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.oracle import fp8
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
        MoEPrepareAndFinalizeNoDPEPModular,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8Dynamic128Sym,
        kFp8Static128BlockSym,
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
    backend, experts = fp8.select_fp8_moe_backend(config, kFp8Static128BlockSym, kFp8Dynamic128Sym)
    layer = types.SimpleNamespace(weight_block_size=[128, 128])
    # The scales too: some kernels want them in another layout.
    v13, v2, s13, s2 = fp8.convert_to_fp8_moe_kernel_format(
        backend, layer, w13.values, w2.values, w13.scale, w2.scale, None, None
    )
    quantization = fp8.make_fp8_moe_quant_config(
        backend, s13, s2, None, None, block_shape=layer.weight_block_size
    )
    kernel = modular_kernel.FusedMoEKernel(
        MoEPrepareAndFinalizeNoDPEPModular(), experts(config, quantization)
    )
    return functools.partial(
        kernel.apply, x, v13, v2, weights, ids, MoEActivation.SILU, num_experts, None, False
    )
