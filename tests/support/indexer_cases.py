"""Queries, keys and pages of an indexer."""

from __future__ import annotations

import dataclasses

import torch
from kv_cases import hazard_rows, poisoned_cache

from consistent_kernels.indexer import indexer_scores, indexer_scores_paged, quantize_indexer_q
from consistent_kernels.interleaved_rotary import interleaved_rotary
from consistent_kernels.kv_cache_fp8 import INDEXER, gather_indexer_k, new_cache, write_kv_fp8
from consistent_kernels.rotary import RopeParameters, rope_tables, rotary
from consistent_kernels.testing import hazard_activations


@dataclasses.dataclass(frozen=True)
class IndexerBatch:
    """Requests whose keys lie packed and in scattered pages; every position has a query."""

    q: torch.Tensor  # [T, H, 128] e4m3
    weights: torch.Tensor  # [T, H] fp32
    k: torch.Tensor  # [T, 128] e4m3
    k_scale: torch.Tensor  # [T] fp32
    starts: torch.Tensor  # [T] first key of the query's request
    ends: torch.Tensor  # [T] its own key, exclusive
    requests: torch.Tensor  # [T]
    cache: torch.Tensor
    block_table: torch.Tensor
    longest: int
    impl: str

    def packed(self, rows: slice | list[int] = slice(None)) -> torch.Tensor:
        """Scores [rows, T] as prefill and training compute them."""
        return indexer_scores(
            self.q[rows],
            self.weights[rows],
            self.k,
            self.k_scale,
            self.starts[rows],
            self.ends[rows],
            impl=self.impl,
        )

    def paged(self, rows: slice | list[int] = slice(None)) -> torch.Tensor:
        """Scores [rows, longest] as decode computes them."""
        return indexer_scores_paged(
            self.q[rows],
            self.weights[rows],
            self.cache,
            self.block_table,
            self.requests[rows],
            (self.ends - self.starts)[rows],
            columns=self.longest,
            impl=self.impl,
        )

    def seen(self, scores: torch.Tensor, row: int, *, packed: bool) -> torch.Tensor:
        """The part of a row of scores that is defined: its own keys."""
        start, end = int(self.starts[row]), int(self.ends[row])
        return scores[start:end] if packed else scores[: end - start]


def make_batch(
    lengths: tuple[int, ...],
    heads: int,
    impl: str,
    *,
    device: str = "cpu",
    seed: int = 1,
    block_size: int = 64,
) -> IndexerBatch:
    """Requests of the given lengths; pages in random order, the rest of the cache poison."""
    tokens, longest = sum(lengths), max(lengths)
    generator = torch.Generator().manual_seed(seed)
    q = hazard_activations((tokens, heads, 128), seed=seed, device=device)
    raw = torch.randn(tokens, heads, generator=generator).to(device)
    quantize_impl = "triton" if device == "cuda" else "reference"
    q, weights = quantize_indexer_q(
        q, raw, softmax_scale=128**-0.5, head_scale=heads**-0.5, impl=quantize_impl
    )
    kv = hazard_rows(tokens, INDEXER, seed=seed + 1, device=device)
    packed = new_cache(-(-tokens // 16), 16, INDEXER, device)
    everyone = torch.arange(tokens, dtype=torch.int32, device=device)
    write_kv_fp8(kv, packed, everyone, layout=INDEXER, impl=quantize_impl)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    k, k_scale = gather_indexer_k(packed, everyone[None], zero, starts=zero)
    pages = -(-longest // block_size)
    cache = poisoned_cache(len(lengths) * pages + 1, block_size, INDEXER, device=device)
    table = torch.randperm(len(lengths) * pages, generator=generator).view(-1, pages)
    starts, ends, requests, slots = [], [], [], []
    first = 0
    for request, length in enumerate(lengths):
        position = torch.arange(length)
        slots.append(table[request, position // block_size] * block_size + position % block_size)
        starts += [first] * length
        ends += range(first + 1, first + length + 1)
        requests += [request] * length
        first += length
    write_kv_fp8(kv, cache, torch.cat(slots).to(device), layout=INDEXER, impl=quantize_impl)
    on_device = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    return IndexerBatch(
        q,
        weights,
        k[0],
        k_scale[0],
        on_device(starts),
        on_device(ends),
        on_device(requests),
        cache,
        table.to(torch.int32).to(device),
        longest,
        impl,
    )


def exact_scores(batch: IndexerBatch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 scores of a row's own keys, and the magnitude that bounds their rounding errors."""
    keys = slice(int(batch.starts[row]), int(batch.ends[row]))
    q, k = batch.q[row].float().double(), batch.k[keys].float().double()
    scale, weights = batch.k_scale[keys].double(), batch.weights[row].double()
    scores = ((k @ q.t()).relu() * weights).sum(1) * scale
    return scores, ((k.abs() @ q.abs().t()) * weights.abs()).sum(1) * scale


FOLD = {"softmax_scale": 128**-0.5, "head_scale": 6**-0.5}
"""Neither product with them is exact, so their order shows."""

STOCK_QUERIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "v32": ("model_executor/layers/sparse_attn_indexer.py", ()),
    "v4": ("models/deepseek_v4/common/ops/fused_indexer_q.py", ("_get_cos_sin",)),
}
"""vLLM's files of the fused kernel, and what it calls there."""

STOCK_FLOOR = {"v32": 448e-10, "v4": 1e-4}
"""Of a head's largest value: below it the kernel's floor or ours takes hold."""

_QUERY_ROPE = RopeParameters(head_dim=128, rotary_dim=64, theta=10000.0, max_position=4096)


def stock_queries(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(positions [9], q [9, 6, 128] bf16, weights [9, 6] bf16) with maxima at borders of scales."""
    q = hazard_activations((9, 6, 128), seed=3)
    # A largest value of 448 * 2^n needs the scale 2^n, and the next one above it twice that.
    q[1, 0], q[1, 1] = 0.0, -0.0
    for head, top in enumerate((448.0, 450.0, 446.0, 7 * 2.0**-10, 1e-9, 3e-5)):
        q[2, head] *= top / q[2, head].float().abs().max() / 2
        q[2, head, 100] = top
    weights = torch.randn(9, 6, generator=torch.Generator().manual_seed(4)).bfloat16()
    positions = torch.tensor([0, 1, 0, 2, 4094, 77, 1023, 1024, 5])
    return positions.to(device), q.to(device), weights.to(device)


def query_tables(device: str) -> torch.Tensor:
    """[max_position, 64] fp32 as vLLM's kernels read it: cosines, then sines."""
    return torch.cat(rope_tables(_QUERY_ROPE, device), dim=1)


def turned_queries(name: str, positions: torch.Tensor, q: torch.Tensor, impl: str) -> torch.Tensor:
    """The rotated queries: halves of the first 64 columns (V3.2), pairs of the last 64 (V4)."""
    if name == "v32":
        return rotary(positions, q, q[:, :1], rope=_QUERY_ROPE, impl=impl)[0]
    return interleaved_rotary(positions, q, rope=_QUERY_ROPE, impl=impl)
