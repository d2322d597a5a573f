"""Top-k of index scores under one total order: score, then position; larger wins."""

from consistent_kernels.sparse_topk.api import sparse_topk, sparse_topk_tickets

__all__ = ["sparse_topk", "sparse_topk_tickets"]
