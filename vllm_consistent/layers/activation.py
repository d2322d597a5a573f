"""SwiGLU activation."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul

from consistent_kernels.silu_and_mul import silu_and_mul
from vllm_consistent.contracts import current_contract


class ConsistentSiluAndMul(SiluAndMul):
    """round(silu(gate) * up) in fp32, one rounding; reads both halves of the fused tensor."""

    def __init__(self, **kwargs: Any) -> None:
        # compile_native would wrap the op in its own torch.compile; it is opaque already.
        super().__init__(**{**kwargs, "compile_native": False})
        self.impl = current_contract(type(self).__name__).implementation("silu_and_mul")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 I] -> [T, I]."""
        half = x.shape[-1] // 2
        return silu_and_mul(x[..., :half], x[..., half:], impl=self.impl)

    forward_native = forward
    forward_cpu = forward
    forward_cuda = forward
