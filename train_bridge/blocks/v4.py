"""DeepSeek-V4 attention over packed sequences, with gradients."""

from __future__ import annotations

import torch

from consistent_kernels.blocks import BlockOps, BlockPrograms, V4Parameters, v4_weight_shapes
from consistent_kernels.blocks.v4 import (
    all_entries,
    project,
    project_index_queries,
    project_out,
)
from consistent_kernels.compressor import packed_windows
from consistent_kernels.indexer import indexer_scores
from consistent_kernels.kv_cache_fp8 import V4
from consistent_kernels.sparse_attention import window_and_selected
from consistent_kernels.sparse_topk import sparse_topk
from train_bridge.blocks.ops import TrainableBlockOps
from train_bridge.blocks.packed_attention import PackedAttention
from train_bridge.blocks.packing import PackedSequences
from train_bridge.blocks.v32 import index_keys


class PackedV4Attention(PackedAttention):
    """The trainer's form: every sequence from position 0, fp32 masters, private FP8 caches.

    No gradient flows into the indexer; its masters are buffers.
    """

    def __init__(
        self,
        params: V4Parameters,
        weights: dict[str, torch.Tensor],
        *,
        programs: BlockPrograms,
        backward: str = "own",
    ) -> None:
        """Take masters by the names of `v4_weight_shapes`; `backward` is of sparse attention."""
        super().__init__(v4_weight_shapes(params), weights, params, programs, backward)

    def _attend(
        self, ops: TrainableBlockOps, hidden: torch.Tensor, sequences: PackedSequences
    ) -> torch.Tensor:
        weights = dict(ops.weights)
        params, positions = self.params, sequences.positions
        projected = project(ops, params, hidden, positions)
        extra = None
        if params.ratio > 1:
            state_rows, first, cu_entries = packed_windows(sequences.cu_seqlens, params.compressor)
            kv_score = ops.linear(hidden, "compress", torch.float32)
            state = ops.compressor_state(kv_score, "compress", positions)
            entries = ops.compress(
                state, "compress", state_rows, first, params.head_rope, params.compressor
            )
            own = cu_entries[sequences.sequence]
            selected = self._select(
                weights, hidden.detach(), projected.compressed_q.detach(), sequences, own
            )
            places = selected + own.to(torch.int32).unsqueeze(1)
            extra = (entries, torch.where(selected >= 0, places, -1))
        window = window_and_selected(
            positions, window=params.window, window_base=sequences.starts, multiple=1
        )
        out = ops.attend(projected.query, projected.entry, window, V4, params.scale, extra, "sinks")
        return project_out(ops, params, out, positions)

    @torch.no_grad()
    def _select(
        self,
        weights: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        compressed_q: torch.Tensor,
        sequences: PackedSequences,
        own: torch.Tensor,
    ) -> torch.Tensor:
        params, programs, positions = self.params, self.programs, sequences.positions
        count = (positions + 1) // params.ratio
        if not params.has_indexer:
            return all_entries(count, max(1, int(count.max()) if len(count) else 1))
        ops = BlockOps(weights, programs)
        compressor = params.index_compressor
        state_rows, first, _ = packed_windows(sequences.cu_seqlens, compressor)
        kv_score = ops.linear(hidden, "index_compress", torch.float32)
        state = ops.compressor_state(kv_score, "index_compress", positions)
        k = ops.compress(state, "index_compress", state_rows, first, params.index_rope, compressor)
        q, folded = project_index_queries(ops, params, hidden, compressed_q, positions)
        keys, scale = index_keys(k, programs.kv_cache)
        ends = own + count
        scores = indexer_scores(q, folded, keys, scale, own, ends, impl=programs.indexer)
        return sparse_topk(scores, own, ends, params.topk, impl=programs.topk)
