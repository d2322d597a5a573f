"""What the reference needs to know about a batch, computed once and shared by all layers.

A batch is cut into query tiles (aligned at absolute positions) and each query tile into steps, one
for every tile of keys that it can see. A (query tile, step) pair is one element of a batched GEMM
of fixed shape, so no row's arithmetic depends on what else is in the batch.
"""

from __future__ import annotations

import dataclasses

import torch

from consistent_kernels.attention.parameters import AttentionParameters
from consistent_kernels.attention.spec import KEY_TILE
from consistent_kernels.attention.tile_shape import TileShape, narrow_shape, wide_shape
from consistent_kernels.errors import invalid

UNIT_ROWS = 32
"""Rows (queries times heads) of one unit of the compiled loop: they share its key tiles. Moves no
bits."""

_ONE_PAGE = 1 << 40

GROUP_BYTES = 6 << 20
"""FP32 keys and scores held at once: bounds memory and stays in cache. Moves no bits."""


@dataclasses.dataclass(frozen=True)
class KeyLayout:
    """Where keys are: in pages, or one sequence after the other.

    Attributes:
        seq_lens: [B] int64, keys of each sequence.
        first_key: [B] int64 row of a sequence's first key, for packed keys; else None.
        block_table: [B, blocks] int64, for pages; else None.
        block_size: keys of one page.
        block_rows: rows from one page to the next.
    """

    seq_lens: torch.Tensor
    first_key: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    block_size: int = 1
    block_rows: int = 1

    def rows(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the row of each position [P, n] of sequences [P]."""
        if self.block_table is None:
            assert self.first_key is not None
            return positions + self.first_key[sequences, None]
        block = torch.div(positions, self.block_size, rounding_mode="floor")
        offset = positions - block * self.block_size
        return self.block_table[sequences[:, None], block] * self.block_rows + offset


@dataclasses.dataclass(frozen=True)
class SplitStart:
    """Query tiles that begin a new key split at a step: what they have so far is put aside.

    Attributes:
        tiles: all of them; fresh: those whose first split ends here; merge: the others.
    """

    tiles: torch.Tensor
    fresh: torch.Tensor
    merge: torch.Tensor


@dataclasses.dataclass(frozen=True)
class TileGroup:
    """Some query tiles, most steps first, and their pairs, step by step.

    Attributes:
        rows: R, rows of one GEMM.
        query_index: [P * Hk * R] row of q as [T * Hq, D] of every GEMM row; any row where the slot
            is outside the batch.
        out_rows: [n] rows of the output, ascending; None for all rows of q.
        out_index: [n * Hq] where [tiles * Hk * R] results hold them.
        key_rows: [P * 64] row of each key; a key that no valid slot sees points to one that is
            seen, so that unused memory is never read.
        bias: [P, 1, R * 64] fp32, 0 where the slot sees the key, else -inf.
        active: active[i] query tiles, the first ones, have a step i.
        split_starts: None, or what happens before step i.
        last_pair: [tiles] the pair of each tile's last step.
        split_tiles: tiles that have more than one split, or None.
        buffers: scratch of the reference, kept for the next layer.
    """

    rows: int
    query_index: torch.Tensor
    out_rows: torch.Tensor | None
    out_index: torch.Tensor
    key_rows: torch.Tensor
    bias: torch.Tensor
    active: list[int]
    split_starts: list[SplitStart | None]
    last_pair: torch.Tensor
    split_tiles: torch.Tensor | None
    buffers: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CompiledBatch:
    """What the compiled loop reads of a batch, all int32 on CPU.

    Attributes:
        items: [n, 3] (sequence, first query, queries) of each unit of work.
        starts: [B + 1] first query row of each sequence; lengths: [B] its keys.
        table: [B, blocks] pages of each sequence; packed keys are one page of endless size.
        block_size: keys of one page.
    """

    items: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    block_size: int


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Everything about a batch that does not depend on q, k or v.

    Attributes:
        params: heads, window and split that it was made for.
        num_tokens: rows of q.
        block_rows: of the pages, or 1.
        max_seq_len: keys of the longest sequence.
        sequences: (first query row, queries, first key row, keys) of each sequence; packed only.
        groups: query tiles in portions of bounded memory.
        batch: for "llvm", which reads no tiles; else None.
    """

    params: AttentionParameters
    num_tokens: int
    block_rows: int
    max_seq_len: int
    sequences: list[tuple[int, int, int, int]]
    groups: list[TileGroup]
    batch: CompiledBatch | None = None


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Query tiles of a batch, most steps first; every field is [tiles] int64."""

    sequence: torch.Tensor
    first: torch.Tensor
    first_valid: torch.Tensor
    first_key_tile: torch.Tensor
    steps: torch.Tensor

    def take(self, index: slice | torch.Tensor) -> _Tiles:
        return _Tiles(**{k: v[index] for k, v in vars(self).items()})


def _query_tiles(
    starts: torch.Tensor, seq_lens: torch.Tensor, used: torch.Tensor, slots: int, window: int | None
) -> _Tiles:
    first_tile = starts[used] // slots
    count = (seq_lens[used] - 1) // slots - first_tile + 1
    sequence = torch.repeat_interleave(used, count)
    before = torch.repeat_interleave(count.cumsum(0) - count - first_tile, count)
    first = (torch.arange(sequence.numel()) - before) * slots
    first_key_tile = torch.zeros_like(first)
    if window is not None:
        first_key_tile = (first - window + 1).clamp_min(0) // KEY_TILE
    steps = first // KEY_TILE - first_key_tile + 1
    tiles = _Tiles(sequence, first, torch.maximum(first, starts[sequence]), first_key_tile, steps)
    return tiles.take(torch.argsort(steps, descending=True, stable=True))


def _split_starts(
    tiles: _Tiles, active: list[int], key_split: int
) -> tuple[list[SplitStart | None], torch.Tensor | None]:
    starts: list[SplitStart | None] = [None] * len(active)
    per_split = key_split // KEY_TILE
    first_split = tiles.first_key_tile // per_split
    last_split = (tiles.first_key_tile + tiles.steps - 1) // per_split
    several = (last_split > first_split).nonzero().view(-1)
    if several.numel() == 0:
        return starts, None
    for step in range(1, len(active)):
        key_tile = tiles.first_key_tile[: active[step]] + step
        begins = key_tile % per_split == 0
        if bool(begins.any()):
            is_fresh = key_tile // per_split == first_split[: active[step]] + 1
            starts[step] = SplitStart(
                begins.nonzero().view(-1),
                (begins & is_fresh).nonzero().view(-1),
                (begins & ~is_fresh).nonzero().view(-1),
            )
    return starts, several


def _bias(
    tiles: _Tiles,
    pair_tile: torch.Tensor,
    keys: torch.Tensor,
    shape: TileShape,
    window: int | None,
) -> torch.Tensor:
    position = tiles.first[pair_tile, None] + torch.arange(shape.slots)
    key, query = keys[:, None, :], position[:, :, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    bias = torch.zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, float("-inf"))
    slot, _ = shape.slot_and_head()
    return bias.index_select(1, slot).view(-1, 1, shape.rows * KEY_TILE)


def _head_rows(
    rows: torch.Tensor, shape: TileShape, params: AttentionParameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where GEMM rows come from and where the heads of a slot are found.

    Args:
        rows: [tiles, slots] rows of q.

    Returns:
        ([tiles, Hk, R] rows of q as [T * Hq, D], [tiles, slots, Hq] rows of [tiles * Hk * R]).
    """
    tiles, heads = rows.shape[0], params.num_kv_heads
    slot, head = shape.slot_and_head()
    q_head = torch.arange(heads)[:, None] * shape.group + head
    source = rows[:, slot].view(tiles, 1, shape.rows) * params.num_heads + q_head
    kv_head = torch.arange(tiles)[:, None] * heads + torch.arange(heads)
    place = kv_head.view(tiles, 1, heads, 1) * shape.rows + shape.row_of().unsqueeze(1)
    return source, place.view(tiles, shape.slots, params.num_heads)


def _group(
    tiles: _Tiles,
    layout: KeyLayout,
    starts: torch.Tensor,
    row_of_position_0: torch.Tensor,
    params: AttentionParameters,
    shape: TileShape,
    num_tokens: int,
) -> TileGroup:
    slots = shape.slots
    lengths = layout.seq_lens[tiles.sequence]
    position = tiles.first[:, None] + torch.arange(slots)
    clamped = torch.minimum(
        torch.maximum(position, starts[tiles.sequence, None]), lengths[:, None] - 1
    )
    rows = clamped + row_of_position_0[tiles.sequence, None]
    query_index, place = _head_rows(rows, shape, params)
    is_valid = clamped == position
    out_rows, order = rows[is_valid].sort()

    steps = tiles.steps.tolist()
    active, count = [], len(steps)
    for step in range(steps[0]):
        while steps[count - 1] <= step:
            count -= 1
        active.append(count)
    pair_tile = torch.cat([torch.arange(n) for n in active])
    pair_step = torch.repeat_interleave(torch.arange(len(active)), torch.tensor(active))
    offsets = torch.tensor(active).cumsum(0) - torch.tensor(active)

    key_tile = tiles.first_key_tile[pair_tile] + pair_step
    keys = key_tile[:, None] * KEY_TILE + torch.arange(KEY_TILE)
    last_seen = torch.minimum(tiles.first + slots, lengths)[pair_tile, None] - 1
    readable = torch.minimum(keys, last_seen)
    if params.sliding_window is not None:
        first_seen = (tiles.first_valid - params.sliding_window + 1).clamp_min(0)
        readable = torch.maximum(readable, first_seen[pair_tile, None])
    split_starts, split_tiles = _split_starts(tiles, active, params.key_split)
    return TileGroup(
        rows=shape.rows,
        query_index=query_index[pair_tile].view(-1),
        out_rows=None if out_rows.numel() == num_tokens else out_rows,
        out_index=place[is_valid][order].view(-1),
        key_rows=layout.rows(tiles.sequence[pair_tile], readable).reshape(-1),
        bias=_bias(tiles, pair_tile, keys, shape, params.sliding_window),
        active=active,
        split_starts=split_starts,
        last_pair=offsets[tiles.steps - 1] + torch.arange(tiles.steps.numel()),
        split_tiles=split_tiles,
    )


def _portions(tiles: _Tiles, shape: TileShape, params: AttentionParameters) -> list[slice]:
    pair_bytes = 4 * KEY_TILE * params.num_kv_heads * (params.head_dim + shape.rows)
    budget = max(1, GROUP_BYTES // pair_bytes)
    portions, begin, pairs = [], 0, 0
    for index, steps in enumerate(tiles.steps.tolist()):
        if pairs and pairs + steps > budget:
            portions.append(slice(begin, index))
            begin, pairs = index, 0
        pairs += steps
    portions.append(slice(begin, tiles.steps.numel()))
    return portions


def _by_shape(
    used: torch.Tensor, query_lens: torch.Tensor, params: AttentionParameters
) -> list[tuple[TileShape, torch.Tensor]]:
    """Return the tile shape of each sequence: wide where it has queries to fill half of one."""
    narrow = narrow_shape(params.group)
    longest = int(query_lens.max())
    if longest <= narrow.slots:
        return [(narrow, used)]
    wide = wide_shape(params.group, params.head_dim)
    if wide is None:
        return [(narrow, used)]
    is_long = query_lens[used] * 2 >= wide.slots
    chosen = [(narrow, used[~is_long]), (wide, used[is_long])]
    return [(shape, sequences) for shape, sequences in chosen if sequences.numel()]


def build_plan(
    cu_seqlens_q: torch.Tensor,
    layout: KeyLayout,
    params: AttentionParameters,
    num_tokens: int,
    *,
    with_tiles: bool = True,
) -> AttentionPlan:
    """Return the plan of a batch whose queries are the last rows of each key sequence.

    Args:
        cu_seqlens_q: [B + 1] int64 on CPU.
        layout: where the keys are.
        num_tokens: rows of q; rows beyond cu_seqlens_q[-1] are padding.
        with_tiles: False leaves the query tiles out, for callers that need the borders only.

    Raises:
        InvalidInputError: more queries than keys, or more rows than q has.
    """
    seq_lens = layout.seq_lens
    row_begin = cu_seqlens_q[:-1]
    query_lens = cu_seqlens_q[1:] - row_begin
    is_used = (query_lens > 0) & (seq_lens > 0)
    starts = seq_lens - query_lens
    if bool((is_used & (starts < 0)).any()):
        bad = int((is_used & (starts < 0)).nonzero()[0])
        raise invalid(
            "attention",
            f"queries of sequence {bad}",
            f"at most its {int(seq_lens[bad])} keys",
            int(query_lens[bad]),
            "Queries are the last rows of each key sequence.",
        )
    if int(cu_seqlens_q[-1]) > num_tokens:
        raise invalid("attention", "cu_seqlens_q", f"at most {num_tokens}", int(cu_seqlens_q[-1]))
    used = is_used.nonzero().view(-1)
    groups: list[TileGroup] = []
    if with_tiles and used.numel():
        row_of_position_0 = row_begin - starts
        for shape, chosen in _by_shape(used, query_lens, params):
            tiles = _query_tiles(starts, seq_lens, chosen, shape.slots, params.sliding_window)
            groups += [
                _group(
                    tiles.take(part), layout, starts, row_of_position_0, params, shape, num_tokens
                )
                for part in _portions(tiles, shape, params)
            ]
    sequences = []
    if layout.first_key is not None:
        columns = (row_begin, query_lens, layout.first_key, seq_lens)
        sequences = [tuple(row) for row in torch.stack(columns, 1)[used].tolist()]
    return AttentionPlan(
        params=params,
        num_tokens=num_tokens,
        block_rows=layout.block_rows,
        max_seq_len=int(seq_lens.max()) if seq_lens.numel() else 0,
        sequences=sequences,
        groups=groups,
    )


def add_batch(plan: AttentionPlan, cu_seqlens_q: torch.Tensor, layout: KeyLayout) -> AttentionPlan:
    """Return the plan with what "llvm" reads.

    Args:
        plan: of `build_plan`.
        cu_seqlens_q, layout: what it was made from.
    """
    table, block_size = layout.block_table, layout.block_size
    if table is None:
        assert layout.first_key is not None
        table, block_size = layout.first_key[:, None], _ONE_PAGE
    counts = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    batch = CompiledBatch(
        items=_work_items(counts, layout.seq_lens, plan.params.group),
        starts=cu_seqlens_q.to(torch.int32),
        lengths=layout.seq_lens.to(torch.int32),
        table=table.to(torch.int32).contiguous(),
        block_size=block_size,
    )
    return dataclasses.replace(plan, batch=batch)


def _work_items(counts: torch.Tensor, lengths: torch.Tensor, group: int) -> torch.Tensor:
    used = ((counts > 0) & (lengths > 0)).nonzero().view(-1)
    size = max(1, UNIT_ROWS // group)
    blocks = (counts[used] + size - 1) // size
    sequence = torch.repeat_interleave(used, blocks)
    before = torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
    first = (torch.arange(sequence.numel()) - before) * size
    queries = (counts[sequence] - first).clamp_max(size)
    return torch.stack((sequence, first, queries), 1).to(torch.int32)
