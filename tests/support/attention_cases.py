"""Batches, pages and an fp64 attention for the attention tests."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from consistent_kernels.attention import (
    AttentionParameters,
    attention_paged,
    attention_varlen,
    write_kv,
)
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations

LENGTHS = (1, 15, 16, 17, 33, 63, 64, 65, 129, 300)

CASES = {
    "smollm2": AttentionParameters(9, 3, 64, 64**-0.5),
    "qwen2-split128": AttentionParameters(14, 2, 64, 64**-0.5, None, 128),
    "mha80-split64": AttentionParameters(4, 4, 80, 80**-0.5, None, 64),
    "mqa96-window70-split64": AttentionParameters(8, 1, 96, 96**-0.5, 70, 64),
    "gqa128-split128": AttentionParameters(16, 8, 128, 128**-0.5, None, 128),
    "gqa256-window100-split128": AttentionParameters(4, 2, 256, 256**-0.5, 100, 128),
    "one-head": AttentionParameters(1, 1, 64, 64**-0.5, None, 64),
    "group32": AttentionParameters(32, 1, 64, 64**-0.5),
}


def borders(lengths: list[int] | tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    """Return [B + 1] int32 row borders."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


@dataclasses.dataclass
class Batch:
    """Packed sequences whose queries are all of their keys."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: tuple[int, ...]
    params: AttentionParameters
    impl: str

    def attend(
        self, chosen: list[int] | None = None, params: AttentionParameters | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `attention_varlen` on the chosen sequences, packed in the order given."""
        chosen = list(range(len(self.lengths))) if chosen is None else chosen
        rows = self.rows(chosen)
        cu = borders([self.lengths[i] for i in chosen], self.q.device.type)
        return attention_varlen(
            self.q[rows],
            self.k[rows],
            self.v[rows],
            cu,
            cu,
            params=params or self.params,
            impl=self.impl,
        )

    def rows(self, chosen: list[int]) -> torch.Tensor:
        """Return the rows of the chosen sequences, in the order given."""
        begin = borders(self.lengths).tolist()
        parts = [torch.arange(begin[i], begin[i + 1]) for i in chosen]
        return torch.cat(parts).to(self.q.device)


def make_batch(
    params: AttentionParameters,
    impl: str,
    device: str,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    seed: int = 1,
    peaked: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    """Return a batch with hazard values; `peaked` scores differ by hundreds, else by a few."""
    tokens = sum(lengths)
    heads, kv_heads, width = params.num_heads, params.num_kv_heads, params.head_dim
    generator = torch.Generator().manual_seed(seed)
    if peaked:
        q = hazard_activations((tokens, heads, width), seed=seed, dtype=dtype)
        k = hazard_activations((tokens, kv_heads, width), seed=seed + 1, dtype=dtype)
    else:
        q = torch.randn(tokens, heads, width, generator=generator).to(dtype)
        k = torch.randn(tokens, kv_heads, width, generator=generator).to(dtype)
        q.view(-1)[::37] = -0.0
        k.view(-1)[::41] = -0.0
    v = hazard_activations((tokens, kv_heads, width), seed=seed + 2, dtype=dtype)
    return Batch(q.to(device), k.to(device), v.to(device), lengths, params, impl)


@dataclasses.dataclass
class Pages:
    """The keys and values of a batch in shuffled, NaN-poisoned pages."""

    batch: Batch
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor

    def attend(
        self,
        parts: list[tuple[int, int, int]],
        *,
        padded_rows: int = 0,
        params: AttentionParameters | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run `attention_paged` on queries [begin, end) of sequences.

        Args:
            parts: (sequence, begin, end) of each request.
            padded_rows: requests without keys behind them, one NaN query each.

        Returns:
            (out, lse, the rows of the batch that the unpadded part answers).
        """
        device = self.batch.q.device.type
        begin = borders(self.batch.lengths).tolist()
        rows = torch.cat([torch.arange(begin[i] + a, begin[i] + b) for i, a, b in parts])
        q = self.batch.q[rows.to(device)]
        table = self.block_table[[i for i, _, _ in parts]]
        seq_lens = [b for _, _, b in parts] + [0] * padded_rows
        query_lens = [b - a for _, a, b in parts] + [1] * padded_rows
        if padded_rows:
            q = torch.cat([q, q.new_full((padded_rows, *q.shape[1:]), float("nan"))])
            wild = table.new_full((padded_rows, table.shape[1]), 2**30)
            table = torch.cat([table, wild])
        out, lse = attention_paged(
            q,
            self.k_cache,
            self.v_cache,
            table,
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
            borders(query_lens, device),
            params=params or self.batch.params,
            impl=self.batch.impl,
            max_query_len=max(query_lens),
            max_seq_len=max(self.batch.lengths),
        )
        return out, lse, rows.to(device)


def fill_pages(batch: Batch, *, block_size: int = 16, seed: int = 9, split: bool = False) -> Pages:
    """Write a batch's keys and values into pages through `write_kv`.

    Args:
        split: put key and value pages alternately in memory, [blocks, 2, block_size, Hk, D].
    """
    need = [-(-n // block_size) for n in batch.lengths]
    blocks = sum(need) + 3
    device = batch.q.device
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(need), max(need) + 2), 2**30, dtype=torch.int32)
    for i, count in enumerate(need):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
    slots = [
        int(table[i, t // block_size]) * block_size + t % block_size
        for i, n in enumerate(batch.lengths)
        for t in range(n)
    ]
    shape = (blocks, 2, block_size) if split else (2, blocks, block_size)
    cache = torch.full((*shape, *batch.k.shape[1:]), float("nan"), dtype=batch.k.dtype)
    k_cache, v_cache = cache.to(device).unbind(1 if split else 0)
    slot_mapping = torch.tensor(slots, device=device)
    write_kv(batch.k, batch.v, k_cache, v_cache, slot_mapping, impl=batch.impl)
    return Pages(batch, k_cache, v_cache, table.to(device))


@dataclasses.dataclass
class Exact:
    """Attention in fp64 with the magnitudes that bound an fp32 one.

    Attributes:
        out: [T, Hq, D]; lse: [T, Hq].
        spread: [T, Hq, D] sum of P |v|.
        score: [T, Hq] largest scale * sum |q| |k| among the keys that the row sees.
        keys: [T] how many it sees.
    """

    out: torch.Tensor
    lse: torch.Tensor
    spread: torch.Tensor
    score: torch.Tensor
    keys: torch.Tensor


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return [queries, keys]; the queries are the last rows."""
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


def attention_fp64(batch: Batch) -> Exact:
    """Naive fp64 attention, one sequence at a time."""
    params, begin = batch.params, borders(batch.lengths).tolist()
    results: list[tuple[torch.Tensor, ...]] = []
    for first, last in itertools.pairwise(begin):
        q, k, v = (x[first:last].double().transpose(0, 1) for x in (batch.q, batch.k, batch.v))
        k, v = (x.repeat_interleave(params.group, 0) for x in (k, v))
        seen = visible(last - first, last - first, params.sliding_window, q.device)
        s = (q @ k.transpose(1, 2) * params.scale).masked_fill(~seen, float("-inf"))
        size = (q.abs() @ k.abs().transpose(1, 2) * params.scale).masked_fill(~seen, 0.0)
        p = s.softmax(-1)
        results.append(
            (
                (p @ v).transpose(0, 1),
                s.logsumexp(-1).transpose(0, 1),
                (p @ v.abs()).transpose(0, 1),
                size.amax(-1).transpose(0, 1),
                seen.sum(-1),
            )
        )
    return Exact(*(torch.cat(column) for column in zip(*results, strict=True)))


def replay(pages: Pages, chunk: int, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compare every row, computed in chunks with all sequences side by side, with `expected`."""
    lengths = pages.batch.lengths
    for start in range(0, max(lengths), chunk):
        parts = [(i, start, min(start + chunk, n)) for i, n in enumerate(lengths) if n > start]
        out, lse, rows = pages.attend(parts)
        assert_bitwise_equal(out, expected[0][rows], f"out, chunk {chunk} at {start}")
        assert_bitwise_equal(lse, expected[1][rows], f"lse, chunk {chunk} at {start}")
