"""The CPU implementations, which share plans and pages."""

from __future__ import annotations

import torch

from consistent_kernels.attention.plan import AttentionPlan
from consistent_kernels.attention.reference import attention_ref

CPU_IMPLEMENTATIONS = ("reference", "llvm")


def attend(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, plan: AttentionPlan, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of `impl`, one of CPU_IMPLEMENTATIONS; see `attention_ref`."""
    if impl == "reference":
        return attention_ref(q, k_rows, v_rows, plan)
    # Imported when called: llvmlite is not everywhere.
    from consistent_kernels.attention.llvm import attention_llvm

    return attention_llvm(q, k_rows, v_rows, plan)


def page_rows(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return all pages as rows [n, Hk, D] and the rows from one page to the next."""
    blocks, size, heads, width = cache.shape
    step = cache.stride(0) // (heads * width)
    rows = cache.as_strided(((blocks - 1) * step + size, heads, width), (heads * width, width, 1))
    return rows, step
