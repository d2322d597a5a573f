"""Override of CPU_ATTN: vLLM's CPU platform ignores every other backend."""

from __future__ import annotations

from typing import ClassVar

from vllm_consistent.attention.backend import ConsistentAttentionBackend


class ConsistentCPUAttentionBackend(ConsistentAttentionBackend):
    """Plain PyTorch; must carry the name of the registry member that it overrides."""

    page_multiple: ClassVar[int] = 8

    @staticmethod
    def get_name() -> str:
        """The overridden member's name."""
        return "CPU_ATTN"
