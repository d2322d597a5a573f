"""Sparse MLA: attention of each query over the entries that its row of indices names."""

from consistent_kernels.sparse_attention.api import (
    check_indices,
    require_backward,
    sparse_attention,
    sparse_attention_bwd,
)
from consistent_kernels.sparse_attention.fp8 import read_slots_fp8, sparse_attention_fp8
from consistent_kernels.sparse_attention.indices import window_and_selected

__all__ = [
    "check_indices",
    "read_slots_fp8",
    "require_backward",
    "sparse_attention",
    "sparse_attention_bwd",
    "sparse_attention_fp8",
    "window_and_selected",
]
