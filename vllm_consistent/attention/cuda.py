"""CUSTOM on CUDA: Triton, captured in full and piecewise graphs."""

from __future__ import annotations

from vllm.v1.attention.backend import MultipleOf

from consistent_kernels.attention.spec import FLASH_PAGE_SIZES
from vllm_consistent.attention.backend import ConsistentAttentionBackend


class ConsistentCUDAAttentionBackend(ConsistentAttentionBackend):
    """Registered as CUSTOM; the configuration hook selects it."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Pages that every CUDA program takes; vLLM cuts larger blocks into these."""
        return list(FLASH_PAGE_SIZES)

    @staticmethod
    def get_name() -> str:
        """The registry member's name."""
        return "CUSTOM"
