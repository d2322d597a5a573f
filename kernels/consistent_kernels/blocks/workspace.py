"""The bf16 rows between an engine block's FP8 caches and its attention: sized once, at start-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

    def pieces(self, queries: int) -> Iterator[slice]:
        """Yield rows of a step that are gathered together; of an empty step one empty piece."""
        step = self.bounds.selected_queries
        for begin in range(0, max(queries, 1), step):
            yield slice(begin, min(begin + step, queries))

    def gather(
        self, sources: Sequence[Source], piece: slice, batch: PagedBatch, impl: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantize the entries of a piece's queries.

        Args:
            sources: caches and the places of all queries of the step; columns in this order.
            piece: from `pieces`.
            batch: of the step.
            impl: of `gather_kv_fp8`.

        Returns:
            (rows of the workspace [n, width] bf16, indices [queries, columns] int32 of them).

        Raises:
            InvalidInputError: more entries than the bounds allow.
        """
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
