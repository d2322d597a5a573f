"""Rotary embeddings: tables are computed inside the op, in fp32, never cached in bf16."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import (
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.rotary import RopeParameters, rotary
from vllm_consistent.contracts import current_contract


class RotaryMixin:
    """What every rotary class of vLLM gets: our op, and the parameters of its tables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        contract = current_contract(type(self).__name__)
        super().__init__(*args, **kwargs)
        self.impl = contract.implementation("rotary")
        config = get_current_vllm_config().model_config.hf_text_config
        self.rope = RopeParameters.from_hf_config(config)
        if not self.is_neox_style or self.head_size != self.rope.head_dim:
            raise UnsupportedError(
                "rotary",
                f"head size {self.head_size}, neox={self.is_neox_style}",
                [f"head size {self.rope.head_dim}, neox=True"],
            )

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        # The stock table would be rounded to the model dtype; the op computes its own.
        return torch.empty(0, dtype=torch.float32)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T], query [T, Hq * D], key [T, Hk * D] -> rotated, same shapes."""
        q = query.view(query.shape[0], -1, self.head_size)
        k = key.view(key.shape[0], -1, self.head_size)
        q, k = rotary(positions, q, k, rope=self.rope, impl=self.impl)
        return q.view(query.shape), k.view(key.shape)

    forward_native = forward
    forward_cpu = forward
    forward_cuda = forward


class ConsistentRotaryEmbedding(RotaryMixin, RotaryEmbedding):
    """rope_type default."""


class ConsistentLlama3RotaryEmbedding(RotaryMixin, Llama3RotaryEmbedding):
    """rope_type llama3."""


class ConsistentLinearScalingRotaryEmbedding(RotaryMixin, LinearScalingRotaryEmbedding):
    """rope_type linear."""


class ConsistentYaRNScalingRotaryEmbedding(RotaryMixin, YaRNScalingRotaryEmbedding):
    """rope_type yarn."""
