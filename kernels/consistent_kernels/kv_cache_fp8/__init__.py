"""FP8 key-value caches of DeepSeek-V3.2 and V4, written and read one way in every phase."""

from consistent_kernels.kv_cache_fp8.api import (
    gather_indexer_k,
    gather_kv_fp8,
    new_cache,
    round_trip_kv_fp8,
    write_kv_fp8,
)
from consistent_kernels.kv_cache_fp8.layout import INDEXER, LAYOUTS, V4, V32, KVLayout
from consistent_kernels.kv_cache_fp8.workspace import WorkspaceBounds, workspace_indices

__all__ = [
    "INDEXER",
    "LAYOUTS",
    "V4",
    "V32",
    "KVLayout",
    "WorkspaceBounds",
    "gather_indexer_k",
    "gather_kv_fp8",
    "new_cache",
    "round_trip_kv_fp8",
    "workspace_indices",
    "write_kv_fp8",
]
