"""The GEMM shapes of a loaded model: what is compiled and probed before the first step."""

from __future__ import annotations

import torch

from consistent_kernels.linear.deep_gemm_start import LARGEST_ROWS, GemmShape
from vllm_consistent.layers.embedding import ConsistentHeadMethod
from vllm_consistent.layers.linear import ConsistentLinearMethod
from vllm_consistent.runner.scoring import PROMPT_ROWS


def gemm_shapes(model: torch.nn.Module, max_tokens: int, max_requests: int) -> set[GemmShape]:
    """Return each (N, K) of the model's linear layers and of its head.

    Args:
        model: after loading.
        max_tokens: tokens of a step, at most.
        max_requests: requests of a step, at most: rows of the head when sampling.
    """
    rows = min(max_tokens, LARGEST_ROWS)
    head_rows = min(max(max_requests, PROMPT_ROWS), LARGEST_ROWS)
    shapes = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, ConsistentLinearMethod) and module.bias is None:
            columns, inner = module.weight.shape
            shapes.update(GemmShape(part, inner, rows) for part in method.parts or (columns,))
        elif isinstance(method, ConsistentHeadMethod):
            # With tied embeddings the embedding is the head; else it costs one shape too many.
            inner = module.weight.shape[1]
            shapes.add(GemmShape(module.org_vocab_size, inner, head_rows, out_fp32=True))
    return shapes
