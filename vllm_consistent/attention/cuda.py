"""CUSTOM on CUDA: Triton, captured in full and piecewise graphs."""

from __future__ import annotations

from vllm_consistent.attention.backend import ConsistentAttentionBackend


class ConsistentCUDAAttentionBackend(ConsistentAttentionBackend):
    """Registered as CUSTOM; the configuration hook selects it."""

    @staticmethod
    def get_name() -> str:
        """The registry member's name."""
        return "CUSTOM"
