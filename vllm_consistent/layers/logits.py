"""From hidden states to fp32 logits."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from consistent_kernels.errors import UnsupportedError


class ConsistentLogitsProcessor(LogitsProcessor):
    """Applies the head and nothing else; scaling and soft caps are refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scale != 1.0 or self.soft_cap is not None or self.logits_as_input:
            raise UnsupportedError(
                "logits",
                f"scale={self.scale}, soft_cap={self.soft_cap}",
                ["scale=1.0, soft_cap=None"],
            )

    def forward(
        self,
        lm_head: Any,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H] -> [T, vocab] fp32."""
        return lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)
