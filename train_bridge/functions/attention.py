"""Autograd for attention over packed sequences: the forward returns the kernel's own tensor."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.attention import (
    AttentionParameters,
    attention_varlen,
    attention_varlen_bwd,
)
from consistent_kernels.attention.plan import AttentionPlan
from train_bridge.functions.ambient import OpFunction


class AttentionFunction(OpFunction):
    """out = attention_varlen(q, k, v); the logsumexp stays with the backward.

    Args of `apply`: q [T, Hq, D]; k, v [Tk, Hk, D]; cu_seqlens_q, cu_seqlens_k [B + 1]; params;
    impl; plan (None, or one from `plan_attention` shared by all layers of the batch).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        params: AttentionParameters,
        impl: str,
        plan: AttentionPlan | None = None,
    ) -> torch.Tensor:
        out, lse = attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, params=params, impl=impl, plan=plan
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        ctx.params, ctx.impl, ctx.plan = params, impl, plan
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        grads = attention_varlen_bwd(
            grad_out,
            q,
            k,
            v,
            out,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            params=ctx.params,
            impl=ctx.impl,
            plan=ctx.plan,
        )
        return (*grads, None, None, None, None, None)
