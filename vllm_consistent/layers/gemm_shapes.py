"""The GEMM shapes of a loaded model: what is compiled and probed before the first step."""

from __future__ import annotations

import torch

from consistent_kernels.deep_gemm_start import LARGEST_ROWS, Shape
from consistent_kernels.experts.deep_gemm_start import layer_shapes
from consistent_kernels.fp8_experts.deep_gemm_start import layer_shapes as fp8_layer_shapes
from consistent_kernels.fp8_linear.deep_gemm import Fp8GemmShape
from consistent_kernels.linear.deep_gemm_start import GemmShape, served_shapes
from vllm_consistent.layers.embedding import ConsistentHeadMethod
from vllm_consistent.layers.fp8 import ConsistentFp8LinearMethod
from vllm_consistent.layers.fp8_experts import ConsistentFp8ExpertsMethod
from vllm_consistent.layers.fused_moe import ConsistentRoutedExperts
from vllm_consistent.layers.linear import ConsistentLinearMethod
from vllm_consistent.layers.router import ConsistentGateMethod
from vllm_consistent.runner.scoring import PROMPT_ROWS

DEEP_GEMM = "deep_gemm"


def gemm_shapes(model: torch.nn.Module, max_tokens: int, max_requests: int) -> set[Shape]:
    """Return each shape that DeepGEMM serves: of linear layers, gates, the head, and experts.

    Args:
        model: after loading.
        max_tokens: tokens of a step, at most.
        max_requests: requests of a step, at most: rows of the head when sampling.
    """
    rows = min(max_tokens, LARGEST_ROWS)
    head_rows = min(max(max_requests, PROMPT_ROWS), LARGEST_ROWS)
    dense: set[GemmShape] = set()
    others: set[Shape] = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "impl", None) != DEEP_GEMM:
            continue
        if isinstance(method, ConsistentLinearMethod) and module.bias is None:
            columns, inner = module.weight.shape
            fp32 = isinstance(method, ConsistentGateMethod)
            dense.update(GemmShape(part, inner, rows, fp32) for part in method.parts or (columns,))
        elif isinstance(method, ConsistentHeadMethod):
            # With tied embeddings the embedding is the head; else it costs one shape too many.
            inner = module.weight.shape[1]
            dense.add(GemmShape(module.org_vocab_size, inner, head_rows, out_fp32=True))
        elif isinstance(method, ConsistentFp8LinearMethod):
            others.add(Fp8GemmShape(*module.weight.shape, rows, method.scale_format))
        elif isinstance(method, ConsistentFp8ExpertsMethod):
            slots = max_tokens * module.top_k
            others.update(fp8_layer_shapes(*_sizes(module), slots, method.scale_format))
        elif isinstance(module, ConsistentRoutedExperts):
            others.update(layer_shapes(*_sizes(module), max_tokens * module.top_k))
    return served_shapes(dense) | others


def _sizes(layer: ConsistentRoutedExperts) -> tuple[int, int, int]:
    """E, H and I."""
    experts, hidden, width = layer.w2_weight.shape
    return experts, hidden, width
