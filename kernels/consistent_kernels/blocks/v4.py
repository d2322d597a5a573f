"""DeepSeek-V4 attention: projections shared by both forms, and the engine's form.

Source: vLLM 0.25.1 `models/deepseek_v4/attention.py`; transformers 5.10.4 `DeepseekV4Attention`. A
query sees its sliding window and compressed entries: those that an indexer selects (ratio 4), all
(ratio 128), or none (ratio 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from consistent_kernels.blocks.ops import BlockOps, check_weights
from consistent_kernels.blocks.paging import PagedBatch, require_sizes
from consistent_kernels.blocks.parameters import (
    INDEX_DIM,
    LATENT,
    BlockPrograms,
    V4Parameters,
    v4_weight_shapes,
)
from consistent_kernels.blocks.workspace import EntryWorkspace
from consistent_kernels.compressor import (
    CompressorParameters,
    paged_windows,
    write_compressor_state,
)
from consistent_kernels.indexer import indexer_scores_paged, quantize_indexer_q
from consistent_kernels.kv_cache_fp8 import (
    INDEXER,
    V4,
    KVLayout,
    new_cache,
    write_kv_fp8,
)
from consistent_kernels.sparse_attention import window_and_selected
from consistent_kernels.sparse_topk import sparse_topk

_LINEARS = ("q_a", "q_b", "kv", "out_b", "index_q", "index_weights")


@dataclasses.dataclass(frozen=True)
class Projections:
    """What tokens bring to the attention: query [T, H, 512], entry [T, 512], compressed_q."""

    query: torch.Tensor
    entry: torch.Tensor
    compressed_q: torch.Tensor


def project(
    ops: BlockOps, params: V4Parameters, hidden: torch.Tensor, positions: torch.Tensor
) -> Projections:
    """Form queries and window entries; keys are values, both rotated in their last columns."""
    compressed = ops.rms_norm(ops.linear(hidden, "q_a"), "q_norm", params.norm_eps)
    q = ops.linear(compressed, "q_b").view(-1, params.heads, LATENT)
    q = ops.rms_norm(q, None, params.norm_eps)
    kv = ops.rms_norm(ops.linear(hidden, "kv"), "kv_norm", params.norm_eps)
    rope = params.head_rope
    return Projections(
        ops.interleaved_rotary(positions, q, rope),
        ops.interleaved_rotary(positions, kv.unsqueeze(1), rope)[:, 0],
        compressed,
    )


def project_index_queries(
    ops: BlockOps,
    params: V4Parameters,
    hidden: torch.Tensor,
    compressed_q: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Form the indexer's e4m3 queries and folded weights; no gradient flows through them."""
    q = ops.linear(compressed_q, "index_q").view(-1, params.index_heads, INDEX_DIM)
    q = ops.interleaved_rotary(positions, q, params.index_rope)
    return quantize_indexer_q(
        q,
        ops.linear(hidden, "index_weights"),
        softmax_scale=INDEX_DIM**-0.5,
        head_scale=params.index_heads**-0.5,
        impl=ops.programs.other,
    )


def project_out(
    ops: BlockOps, params: V4Parameters, out: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Undo the values' rotation at the query's position, then project by groups of heads."""
    out = ops.inverse_rotary_(positions, out, params.head_rope)
    width = params.heads * LATENT // params.groups
    grouped = ops.grouped_linear(out.reshape(out.shape[0], params.groups, width), "out_a")
    return ops.linear(grouped.flatten(1), "out_b")


def all_entries(count: torch.Tensor, most: int) -> torch.Tensor:
    """Return [T, most] int32: entries count - 1 down to 0, then -1, as a selection of all gives."""
    column = torch.arange(most, device=count.device, dtype=torch.int32)
    return (count.unsqueeze(1).to(torch.int32) - 1 - column).clamp_min(-1)


class _PagedCompressor:
    """Paged state and entries of one compressor."""

    def __init__(
        self,
        name: str,
        params: CompressorParameters,
        layout: KVLayout,
        blocks: int,
        block_size: int,
        device: torch.device | str,
    ) -> None:
        self.name, self.params, self.layout = name, params, layout
        shape = (blocks * block_size, 2 * params.state_width)
        self.state = torch.zeros(shape, dtype=torch.float32, device=device)
        self.cache = new_cache(blocks, block_size, layout, device)

    def step(
        self, ops: BlockOps, block: V4Parameters, hidden: torch.Tensor, batch: PagedBatch
    ) -> None:
        """Store the tokens' state and the entries that they close."""
        params, other = self.params, ops.programs.other
        kv_score = ops.linear(hidden, self.name, torch.float32)
        bias = ops.weights[f"{self.name}_bias"].detach()
        write_compressor_state(kv_score, bias, batch.positions, self.state, batch.slots, impl=other)
        rows = paged_windows(
            batch.positions, batch.requests, batch.block_table, batch.block_size, params
        )
        rows = torch.where((batch.slots >= 0).unsqueeze(1), rows, -1)
        entry = batch.positions // params.ratio
        rope = block.head_rope if self.layout is V4 else block.index_rope
        closes = (batch.positions + 1) % params.ratio == 0
        slots = batch.slots_of(entry, closes)
        ops.compress_to_cache(
            self.state, self.name, rows, entry * params.ratio, self.cache, slots, rope, params,
            self.layout,
        )  # fmt: skip


class PagedV4Attention:
    """The engine's form: paged FP8 caches and fp32 compressor states, one path for all phases."""

    def __init__(
        self,
        params: V4Parameters,
        weights: Mapping[str, torch.Tensor],
        *,
        programs: BlockPrograms,
        blocks: int,
        max_seq_len: int,
        block_size: int = 64,
        queries: int = 256,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate caches and workspace; arguments as in `PagedV32Attention`.

        Weights are by the names of `v4_weight_shapes`.
        """
        require_sizes("PagedV4Attention", blocks, block_size, max_seq_len, params.rope.max_position)
        check_weights("PagedV4Attention", weights, v4_weight_shapes(params))
        self.params = params
        self.ops = BlockOps(weights, programs)
        self.cache = new_cache(blocks, block_size, V4, device)
        compressors = [name for name in ("compress", "index_compress") if name in weights]
        self.ops.prepare(
            [name for name in _LINEARS if name in weights],
            compressors,
            ["q_norm", "kv_norm", "out_a", *(f"{name}_norm" for name in compressors)],
        )
        self.max_seq_len = max_seq_len
        self.workspace = None
        if programs.read == "workspace":
            entries = params.window + (params.most_entries(max_seq_len) if params.ratio > 1 else 0)
            self.workspace = EntryWorkspace(V4, queries, entries, device)
        pages = (blocks, block_size, device)
        self.entries = self.index = None
        if params.ratio > 1:
            self.entries = _PagedCompressor("compress", params.compressor, V4, *pages)
        if params.has_indexer:
            self.index = _PagedCompressor(
                "index_compress", params.index_compressor, INDEXER, *pages
            )

    def forward(self, hidden: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Store the tokens and attend; see `PagedV32Attention.forward`."""
        batch.require_within(
            "PagedV4Attention", hidden, self.params.hidden, self.ops.dtype, self.cache.shape[1],
            self.max_seq_len,
        )  # fmt: skip
        ops, params = self.ops, self.params
        projected = project(ops, params, hidden, batch.positions)
        write_kv_fp8(
            projected.entry, self.cache, batch.slots, layout=V4, impl=ops.programs.kv_cache
        )
        for compressor in (self.entries, self.index):
            if compressor is not None:
                compressor.step(ops, params, hidden, batch)
        zero = torch.zeros_like(batch.positions)
        window = window_and_selected(
            batch.positions, window=params.window, window_base=zero, multiple=1
        )
        selected = None
        if self.entries is not None:
            selected = self._select(hidden, projected.compressed_q, batch)
        attend = self._attend_fp8 if ops.programs.read == "fp8" else self._attend
        out = attend(projected.query, window, selected, batch)
        return project_out(ops, params, out, batch.positions)

    def _attend(
        self,
        query: torch.Tensor,
        window: torch.Tensor,
        selected: torch.Tensor | None,
        batch: PagedBatch,
    ) -> torch.Tensor:
        sources = [(self.cache, window)]
        if self.entries is not None and selected is not None:
            sources.append((self.entries.cache, selected))
        return self.workspace.attend(
            query,
            sources,
            batch,
            self.ops.programs.kv_cache,
            lambda *piece, out: self.ops.sparse_attention(
                *piece, self.params.scale, LATENT, "sinks", out
            ),
            LATENT,
        )

    def _attend_fp8(
        self,
        query: torch.Tensor,
        window: torch.Tensor,
        selected: torch.Tensor | None,
        batch: PagedBatch,
    ) -> torch.Tensor:
        extra = None
        if self.entries is not None and selected is not None:
            extra = (self.entries.cache, batch.physical(selected))
        slots = batch.physical(window)
        return self.ops.sparse_attention_fp8(
            query, self.cache, slots, self.params.scale, extra, "sinks"
        )

    def _select(
        self, hidden: torch.Tensor, compressed_q: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        params = self.params
        count = ((batch.positions + 1) // params.ratio).to(torch.int32)
        most = max(1, batch.max_seq_len // params.ratio)
        if self.index is None:
            return all_entries(count, most)
        q, weights = project_index_queries(self.ops, params, hidden, compressed_q, batch.positions)
        scores = indexer_scores_paged(
            q, weights, self.index.cache, batch.block_table, batch.requests, count,
            columns=most, impl=self.ops.programs.indexer,
        )  # fmt: skip
        return sparse_topk(
            scores, torch.zeros_like(count), count, params.topk, impl=self.ops.programs.topk
        )
