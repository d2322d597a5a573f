"""Autograd for the KV compressor over packed sequences."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.compressor import (
    CompressorParameters,
    compress,
    compress_bwd,
    compressor_state,
    compressor_state_bwd,
)
from consistent_kernels.rotary import RopeParameters
from train_bridge.functions.ambient import OpFunction


class CompressorStateFunction(OpFunction):
    """state = compressor_state(kv_score, position_bias); position_bias is an fp32 master."""

    @staticmethod
    def forward(
        ctx: Any,
        kv_score: torch.Tensor,
        position_bias: torch.Tensor,
        positions: torch.Tensor,
        impl: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(positions)
        ctx.ratio = position_bias.shape[0]
        return compressor_state(kv_score, position_bias, positions, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad_state: torch.Tensor) -> tuple[Any, ...]:
        (positions,) = ctx.saved_tensors
        return (*compressor_state_bwd(grad_state, positions, ctx.ratio), None, None)


class CompressFunction(OpFunction):
    """entries = compress(state, rows); weight may be a master of another dtype than the model's.

    Args of `apply`: state [N, 2 W] fp32; weight [head_dim]; rows [E, tokens] int32; positions [E];
    rope; params; dtype of the entries; impl.
    """

    @staticmethod
    def forward(
        ctx: Any,
        state: torch.Tensor,
        weight: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        rope: RopeParameters,
        params: CompressorParameters,
        dtype: torch.dtype,
        impl: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(state, weight, rows, positions)
        ctx.rope, ctx.params, ctx.dtype, ctx.impl = rope, params, dtype, impl
        rounded = weight.to(dtype)
        return compress(
            state, rows, positions, rounded, rope=rope, params=params, dtype=dtype, impl=impl
        )

    @staticmethod
    def backward(ctx: Any, grad_entries: torch.Tensor) -> tuple[Any, ...]:
        state, weight, rows, positions = ctx.saved_tensors
        grad_state, grad_weight = compress_bwd(
            grad_entries,
            state,
            rows,
            positions,
            weight.to(ctx.dtype),
            rope=ctx.rope,
            params=ctx.params,
            impl=ctx.impl,
        )
        return (grad_state, grad_weight.to(weight.dtype), *(None,) * 6)
