"""Autograd for the FP8 KV cache: attention reads what the engine's cache would give back."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.kv_cache_fp8 import KVLayout, round_trip_kv_fp8
from train_bridge.functions.ambient import OpFunction


class KVCacheFP8Function(OpFunction):
    """rows = the dequantized cache entries of kv [T, width]; gradient straight through onto kv.

    The rounding to FP8 has derivative zero almost everywhere; the straight-through estimator
    (Bengio et al., arXiv 1308.3432) takes it for the identity, as the RoPE part really is.
    """

    @staticmethod
    def forward(ctx: Any, kv: torch.Tensor, layout: KVLayout, impl: str) -> torch.Tensor:
        return round_trip_kv_fp8(kv, layout=layout, impl=impl)

    @staticmethod
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[Any, ...]:
        return grad_rows, None, None
