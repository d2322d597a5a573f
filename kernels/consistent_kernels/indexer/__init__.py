"""Index scores of DeepSeek sparse attention: which keys a query attends to."""

from consistent_kernels.indexer.api import (
    indexer_schedule,
    indexer_scores,
    indexer_scores_paged,
    quantize_indexer_q,
)

__all__ = [
    "indexer_schedule",
    "indexer_scores",
    "indexer_scores_paged",
    "quantize_indexer_q",
]
