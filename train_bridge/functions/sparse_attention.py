"""Autograd for sparse attention: the forward returns the kernel's own tensor."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.kv_cache_fp8 import KVLayout, new_cache, write_kv_fp8
from consistent_kernels.sparse_attention import (
    read_slots_fp8,
    require_backward,
    sparse_attention,
    sparse_attention_bwd,
    sparse_attention_fp8,
)
from train_bridge.functions.ambient import OpFunction


class SparseAttentionFunction(OpFunction):
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
        require_backward(backward)
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


_PAGE = 64


def _private_cache(kv: torch.Tensor, layout: KVLayout, impl: str) -> torch.Tensor:
    """Return pages that hold row i of kv [S, width] in slot i."""
    cache = new_cache(max(1, -(-len(kv) // _PAGE)), _PAGE, layout, kv.device)
    slots = torch.arange(len(kv), dtype=torch.int32, device=kv.device)
    write_kv_fp8(kv, cache, slots, layout=layout, impl=impl)
    return cache


def _rows(cache: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Return all slots of a private cache as the forward read them, [slots, width]."""
    slots = torch.arange(cache.shape[0] * cache.shape[1], device=cache.device)
    return read_slots_fp8(cache, slots, layout)


class SparseAttentionFP8Function(OpFunction):
    """out = sparse_attention_fp8 over private FP8 caches of kv and extra_kv.

    The rounding to FP8 is passed straight through: gradients go to kv and extra_kv as if the rows
    that attention read were theirs.

    Args of `apply`: q [T, H, width]; kv [S, width] bf16; slots [T, K] int32, rows of kv; extra_kv,
    extra_slots (V4) or None; sinks [H] fp32 or None; scale; layout; impl; other (of the caches);
    backward ("own" or "cudnn").
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        kv: torch.Tensor,
        slots: torch.Tensor,
        extra_kv: torch.Tensor | None,
        extra_slots: torch.Tensor | None,
        sinks: torch.Tensor | None,
        scale: float,
        layout: KVLayout,
        impl: str,
        other: str,
        backward: str = "own",
    ) -> torch.Tensor:
        require_backward(backward)
        cache = _private_cache(kv, layout, other)
        extra = None
        if extra_kv is not None:
            extra = (_private_cache(extra_kv, layout, other), extra_slots)
        out, lse = sparse_attention_fp8(
            q, cache, slots, scale=scale, extra=extra, sinks=sinks, impl=impl
        )
        ctx.save_for_backward(
            q, cache, slots, *((None, None) if extra is None else extra), out, lse, sinks
        )
        ctx.rows = (len(kv), 0 if extra_kv is None else len(extra_kv))
        ctx.scale, ctx.layout, ctx.backward_name = scale, layout, backward
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        q, cache, slots, extra_cache, extra_slots, out, lse, sinks = ctx.saved_tensors
        rows, indices = _rows(cache, ctx.layout), slots
        first = len(rows)
        if extra_cache is not None:
            rows = torch.cat((rows, _rows(extra_cache, ctx.layout)))
            more = torch.where(extra_slots >= 0, extra_slots + first, -1)
            indices = torch.cat((slots, more), dim=1)
        grad_q, grad_rows, grad_sinks = sparse_attention_bwd(
            grad_out,
            q,
            rows,
            indices,
            out,
            lse,
            scale=ctx.scale,
            sinks=sinks,
            impl="triton" if q.is_cuda else "reference",
            backward=ctx.backward_name,
        )
        own, extra = ctx.rows
        grad_extra = grad_rows[first : first + extra] if extra_cache is not None else None
        return (grad_q, grad_rows[:own], None, grad_extra, None, grad_sinks, *(None,) * 5)
