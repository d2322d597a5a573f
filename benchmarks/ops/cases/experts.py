"""Experts of Qwen3-30B-A3B in bf16, against the fused MoE kernels that stock vLLM runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.deep_gemm_start import prepare
from consistent_kernels.experts import experts, prepare_expert_weight
from consistent_kernels.experts.deep_gemm_start import layer_shapes
from consistent_kernels.experts.spec import IMPLEMENTATIONS

OP = "experts"
_SHAPE = (128, 8, 2048, 768)
_SMALL = (8, 2, 64, 48)
"""Experts E, experts of a token K, hidden H, width I."""

_REASONS = {
    "triton": "tiles that leave a row's bits alone; stock takes them from a table tuned by shape",
    "deep_gemm": "an expert's rows are padded to whole tiles; the Triton program is the one chosen",
}


def cases(setting: Setting) -> Iterator[Case]:
    """Routed rows to their weighted sum: layout, both GEMMs, activation, combination."""
    num_experts, top_k, hidden, width = _SMALL if setting.small else _SHAPE
    rows = max(setting.rows())
    if setting.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        prepare(layer_shapes(num_experts, hidden, width, rows * top_k), device)
    x = setting.hazards(rows, hidden, seed=1)
    w13 = setting.normal(num_experts, 2 * width, hidden, seed=2, scale=0.02)
    w2 = setting.normal(num_experts, hidden, width, seed=3, scale=0.02)
    weights, ids = setting.normal(rows, num_experts, seed=4).float().softmax(-1).topk(top_k)
    ids = ids.int()
    for impl in setting.implementations(IMPLEMENTATIONS):
        prepared = [prepare_expert_weight(w, dtype=x.dtype, impl=impl) for w in (w13, w2)]
        run = functools.partial(_ours, x, *prepared, ids, weights, impl)
        relations = functools.partial(check_rows, run, rows)
        for m in setting.rows():
            yield Case(
                op=OP,
                shape=f"M={m} E={num_experts} K={top_k} H={hidden} I={width}",
                impl=impl,
                ours=functools.partial(run, slice(0, m)),
                stock=_stock(x[:m], w13, w2, ids[:m], weights[:m]),
                relations=relations,
                reason=_REASONS.get(impl),
            )


def _ours(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    impl: str,
    rows: slice,
) -> torch.Tensor:
    return experts(x[rows], w13, w2, ids[rows], weights[rows], layout="fastest", impl=impl)


def _stock(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    if x.is_cuda:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        return functools.partial(fused_experts, x, w13, w2, weights, ids)

    def expert_by_expert() -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(w13.shape[0]):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ w13[expert].t()).chunk(2, dim=-1)
            y = (torch.nn.functional.silu(gate) * up) @ w2[expert].t()
            out.index_add_(0, token, (y * weights[token, slot, None]).to(x.dtype))
        return out

    return expert_by_expert
