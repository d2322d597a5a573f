"""What an engine step says of its tokens: integers, shared by all caches of a block."""

from __future__ import annotations

import dataclasses

import torch

from consistent_kernels.errors import invalid
from consistent_kernels.index_range import check_range


def require_hidden(
    op: str, hidden: torch.Tensor, tokens: int, width: int, dtype: torch.dtype
) -> None:
    """Raise unless hidden is [tokens, width] in dtype.

    Raises:
        InvalidInputError: names both.
    """
    if hidden.shape != (tokens, width) or hidden.dtype != dtype:
        given = f"{hidden.dtype} of shape {tuple(hidden.shape)}"
        raise invalid(op, "hidden", f"{dtype} of shape ({tokens}, {width})", given)


def require_sizes(
    op: str, blocks: int, block_size: int, max_seq_len: int, max_position: int
) -> None:
    """Raise unless caches of this size hold a token, and the rotary tables its last position.

    Raises:
        InvalidInputError: names the first size that is none.
    """
    sizes = {"blocks": blocks, "block_size": block_size, "max_seq_len": max_seq_len}
    for name, value in sizes.items():
        if value < 1:
            raise invalid(op, name, "at least 1", value)
    if max_seq_len > max_position:
        expected = f"at most rope.max_position = {max_position}"
        raise invalid(op, "max_seq_len", expected, max_seq_len, "Make a longer rotary table")


@dataclasses.dataclass(frozen=True)
class PagedBatch:
    """The tokens of one step, of any requests in any phase.

    Attributes:
        positions: [T] inside the request.
        requests: [T] rows of the block table.
        slots: [T] where a token is stored, page * block_size + offset; -1 for a padded row.
        block_table: [B, n] int32 pages; an entry of a compressed cache takes the same pages as a
            token of that number would.
        block_size: tokens of a page.
        max_seq_len: bound of the positions, known on the host.
    """

    positions: torch.Tensor
    requests: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    max_seq_len: int

    def require_within(
        self,
        op: str,
        hidden: torch.Tensor,
        width: int,
        dtype: torch.dtype,
        block_size: int,
        max_seq_len: int,
    ) -> None:
        """Refuse what a block cannot take; on a CPU also positions beyond the batch's bound.

        Args:
            op: the block's name.
            hidden: [T, width] in dtype, of the same tokens.
            width, dtype, block_size, max_seq_len: what the block was made for.

        Raises:
            InvalidInputError: another number of rows or columns, no integers, pages of another
                size, a longer bound, or (on a CPU) a position that the bound does not allow.
        """
        require_hidden(op, hidden, hidden.shape[0], width, dtype)
        tokens = hidden.shape[:1]
        for name in ("positions", "requests", "slots"):
            value = getattr(self, name)
            if value.shape != tokens or value.dtype not in (torch.int32, torch.int64):
                given = f"{value.dtype} of shape {tuple(value.shape)}"
                raise invalid(op, name, f"int32 or int64 of shape {tuple(tokens)}", given)
        table = self.block_table
        if table.dim() != 2 or table.dtype != torch.int32:
            given = f"{table.dtype} of shape {tuple(table.shape)}"
            raise invalid(op, "block_table", "2-D int32", given)
        if self.block_size != block_size:
            hint = "the tokens of a page of its caches"
            raise invalid(op, "block_size", f"{block_size}, {hint}", self.block_size)
        if not 1 <= self.max_seq_len <= max_seq_len:
            expected = f"at most {max_seq_len}" if self.max_seq_len > 0 else "at least 1"
            raise invalid(op, "max_seq_len", expected, self.max_seq_len)
        if self.positions.device.type == "cpu" and not torch.compiler.is_compiling():
            # Entries beyond the bound would be left out without a word.
            check_range(op, "positions", self.positions, 0, self.max_seq_len)

    def physical(self, places: torch.Tensor) -> torch.Tensor:
        """Return the slots [T, K] int32 of places [T, K] of each token's request; -1 stays -1."""
        column = (places.clamp_min(0) // self.block_size).clamp_max(self.block_table.shape[1] - 1)
        pages = self.block_table[self.requests.long().unsqueeze(1), column.long()].long()
        slots = pages * self.block_size + places % self.block_size
        return torch.where(places >= 0, slots, -1).to(torch.int32)

    def slots_of(self, places: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        """Return the slots [T] of a place each, -1 where not `stored` or on a padded row."""
        column = (places // self.block_size).clamp_max(self.block_table.shape[1] - 1)
        pages = self.block_table[self.requests.long(), column.long()].long()
        slots = pages * self.block_size + places % self.block_size
        return torch.where(stored & (self.slots >= 0), slots, -1)
