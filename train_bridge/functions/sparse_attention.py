"""Autograd for sparse attention: the forward returns the kernel's own tensor."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.sparse_attention import sparse_attention, sparse_attention_bwd


class SparseAttentionFunction(torch.autograd.Function):
    """out = sparse_attention(q, kv, indices, sinks); no gradient flows into the indices.

    Args of `apply`: q [T, H, D]; kv [S, D]; indices [T, K] int32; sinks [H] fp32 or None; scale;
    d_v; impl; backward ("own" or "cudnn").
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float,
        d_v: int,
        impl: str,
        backward: str = "own",
    ) -> torch.Tensor:
        out, lse = sparse_attention(q, kv, indices, sinks=sinks, scale=scale, d_v=d_v, impl=impl)
        ctx.save_for_backward(q, kv, indices, out, lse, sinks)
        ctx.scale, ctx.impl, ctx.backward_name = scale, impl, backward
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        q, kv, indices, out, lse, sinks = ctx.saved_tensors
        grad_q, grad_kv, grad_sinks = sparse_attention_bwd(
            grad_out,
            q,
            kv,
            indices,
            out,
            lse,
            sinks=sinks,
            scale=ctx.scale,
            impl=ctx.impl,
            backward=ctx.backward_name,
        )
        return grad_q, grad_kv, None, grad_sinks, None, None, None, None
