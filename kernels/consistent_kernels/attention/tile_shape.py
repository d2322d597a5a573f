"""Shapes of the reference's GEMM tiles, and the probe that lets a wide one stand for narrow."""

from __future__ import annotations

import dataclasses
import functools

import torch

from consistent_kernels.attention.spec import KEY_TILE, TILE_ROWS, WIDE_ROWS, query_slots
from consistent_kernels.cpu_gemm import plain_gemms


@dataclasses.dataclass(frozen=True)
class TileShape:
    """Rows of one GEMM: `stack` narrow tiles, each `narrow_slots` positions times `group` heads.

    A narrow tile has a multiple of 8 rows: MKL takes other kernels for other remainders of 8 when
    it splits a matrix among threads (seen with 5, 6 and 7 rows).
    """

    group: int
    narrow_slots: int
    narrow_rows: int
    stack: int

    @property
    def slots(self) -> int:
        """Query positions of a tile; tiles begin at multiples of it."""
        return self.narrow_slots * self.stack

    @property
    def rows(self) -> int:
        """Rows of the GEMM."""
        return self.narrow_rows * self.stack

    def slot_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slot and the head of each GEMM row; a filler row repeats the last one."""
        row = torch.arange(self.rows)
        inner = (row % self.narrow_rows).clamp_max(self.narrow_slots * self.group - 1)
        return row // self.narrow_rows * self.narrow_slots + inner // self.group, inner % self.group

    def row_of(self) -> torch.Tensor:
        """Return the GEMM row of each slot and head, [slots, group]."""
        slot = torch.arange(self.slots)[:, None]
        narrow = slot // self.narrow_slots * self.narrow_rows
        return narrow + slot % self.narrow_slots * self.group + torch.arange(self.group)


@functools.cache
def narrow_shape(group: int) -> TileShape:
    """Return the shape that decode uses and that defines the bits."""
    slots = query_slots(group, TILE_ROWS)
    rows = -(-slots * group // TILE_ROWS) * TILE_ROWS
    return TileShape(group, slots, rows, 1)


def wide_shape(group: int, head_dim: int) -> TileShape | None:
    """Return a stack of narrow tiles for prefill, or None where it would not keep the bits."""
    narrow = narrow_shape(group)
    stack = 1
    while 2 * stack * narrow.rows <= WIDE_ROWS and 2 * stack * narrow.slots <= KEY_TILE:
        stack *= 2
    wide = dataclasses.replace(narrow, stack=stack)
    if stack == 1 or not rows_keep_bits(wide, head_dim, torch.get_num_threads()):
        return None
    return wide


@functools.cache
def rows_keep_bits(wide: TileShape, head_dim: int, threads: int) -> bool:
    """Whether both GEMMs give each row of a wide tile the bits of the narrow one, in this process.

    A BLAS picks its kernel by shape and threads, never by values, so one batch of random values
    answers for all; about a millisecond for each (shape, head_dim, threads).
    """
    generator = torch.Generator().manual_seed(head_dim)
    batch = 2 * threads + 1
    q = torch.randn(batch, wide.rows, head_dim, generator=generator, dtype=torch.float32)
    k = torch.randn(batch, KEY_TILE, head_dim, generator=generator, dtype=torch.float32)
    p = torch.rand(batch, wide.rows, KEY_TILE, generator=generator, dtype=torch.float32)
    for count in (2, batch):
        for a, b in ((q[:count], k[:count].transpose(1, 2)), (p[:count], k[:count])):
            with plain_gemms():
                whole = torch.bmm(a, b).view(torch.int32)
            for row in range(0, wide.rows, wide.narrow_rows):
                rows = slice(row, row + wide.narrow_rows)
                with plain_gemms():
                    part = torch.bmm(a[:, rows].contiguous(), b).view(torch.int32)
                if not torch.equal(whole[:, rows], part):
                    return False
    return True
