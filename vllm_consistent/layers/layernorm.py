"""RMSNorm, with and without the residual addition; also q and k norms."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.layernorm import RMSNorm

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.rms_norm import add_rms_norm, rms_norm
from vllm_consistent.contracts import current_contract


class ConsistentRMSNorm(RMSNorm):
    """fp32 through the weight, one rounding; the residual sum is rounded, then squared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.impl = current_contract(type(self).__name__).implementation("rms_norm")
        if not self.has_weight or self.variance_size_override is not None:
            raise UnsupportedError(
                "rms_norm", "no weight or a partial variance", ["weight over the whole row"]
            )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[..., H] -> [..., H]; with a residual also the rounded sum."""
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon, impl=self.impl)
        return add_rms_norm(x, residual, self.weight, self.variance_epsilon, impl=self.impl)

    # Whatever vLLM dispatches to, there is one arithmetic.
    forward_native = forward
    forward_cpu = forward
    forward_cuda = forward
