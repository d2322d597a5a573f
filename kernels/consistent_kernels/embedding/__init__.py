"""Token embedding: a gather of rows."""

from consistent_kernels.embedding.api import embedding, embedding_bwd

__all__ = ["embedding", "embedding_bwd"]
