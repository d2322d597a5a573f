"""Autograd for the token embedding: rows of the rounded table, gradient onto the master."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.embedding import embedding, embedding_bwd
from train_bridge.functions.ambient import OpFunction


class EmbeddingFunction(OpFunction):
    """y[t] = round(master[ids[t]]): only the rows that are read are cast."""

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, master: torch.Tensor, dtype: torch.dtype, impl: str
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.master_dtype, ctx.impl = master.shape[0], master.dtype, impl
        # Casting after the gather equals gathering from the cast table: rounding is elementwise.
        return embedding(ids, master.detach(), impl=impl).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        (ids,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        grad = embedding_bwd(grad_y, ids, ctx.rows, impl=ctx.impl)
        return None, grad.to(ctx.master_dtype), None, None
