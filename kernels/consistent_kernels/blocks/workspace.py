"""The bf16 rows between an engine block's FP8 caches and its attention: sized once, at start-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from consistent_kernels.blocks.paging import PagedBatch
from consistent_kernels.errors import invalid
from consistent_kernels.kv_cache_fp8 import KVLayout, WorkspaceBounds, gather_kv_fp8

Source = tuple[torch.Tensor, torch.Tensor]
"""(cache [blocks, block_size, bytes] uint8, places [T, K] int32 in the request, -1 for none)."""


class EntryWorkspace:
    """Room for the entries of so many queries; a step of more queries goes through it in pieces.

    Which queries share a piece moves no bit: a query's output follows its own entries alone.
    """

    def __init__(
        self, layout: KVLayout, queries: int, entries: int, device: torch.device | str
    ) -> None:
        """Allocate it.

        Args:
            layout: of the caches.
            queries: gathered at a time.
            entries: most of a query, over all caches.

        Raises:
            InvalidInputError: no queries or no entries.
        """
        if queries < 1 or entries < 1:
            given = f"{queries} and {entries}"
            raise invalid("EntryWorkspace", "queries, entries", "at least 1 each", given)
        self.bounds = WorkspaceBounds(layout, selected_queries=queries, k=entries)
        self.rows = self.bounds.allocate(device)

    def attend(
        self,
        query: torch.Tensor,
        sources: Sequence[Source],
        batch: PagedBatch,
        impl: str,
        attention: Callable[..., torch.Tensor],
        width: int,
    ) -> torch.Tensor:
        """Attend over the entries of every query of a step, piece by piece.

        Args:
            query: [T, heads, width].
            sources: caches and the places of all queries; columns in this order.
            batch: of the step.
            impl: of `gather_kv_fp8`.
            attention: (queries of a piece, rows, indices, out=their part of the result).
            width: of the values.

        Returns:
            [T, heads, width], the dtype of query.

        Raises:
            InvalidInputError: more entries than the bounds allow.
        """
        step = self.bounds.selected_queries
        out = query.new_empty((*query.shape[:2], width))
        for begin in range(0, max(len(query), 1), step):  # of an empty step one empty piece
            piece = slice(begin, begin + step)
            gathered = self._gather(sources, piece, batch, impl)
            attention(query[piece], *gathered, out=out[piece])
        return out

    def _gather(
        self, sources: Sequence[Source], piece: slice, batch: PagedBatch, impl: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantize a piece's entries: (rows [n, width] bf16, indices [queries, columns])."""
        sources = [(cache, places[piece]) for cache, places in sources]
        queries, columns = sources[0][1].shape[0], sum(at.shape[1] for _, at in sources)
        used = self.bounds.view(self.rows, queries, columns).view(-1, self.bounds.layout.width)
        indices = torch.empty((queries, columns), dtype=torch.int32, device=used.device)
        row = column = 0
        for cache, places in sources:
            end_row, end_column = row + places.numel(), column + places.shape[1]
            gather_kv_fp8(
                cache, places, batch.requests[piece], layout=self.bounds.layout, impl=impl,
                block_table=batch.block_table,
                out=used[row:end_row].view(*places.shape, self.bounds.layout.width),
                indices=indices[:, column:end_column], first_row=row,
            )  # fmt: skip
            row, column = end_row, end_column
        return used, indices
