"""DeepSeek-V3.2 attention over packed sequences, with gradients."""

from __future__ import annotations

import torch

from consistent_kernels.blocks import BlockOps, BlockPrograms, V32Parameters, v32_weight_shapes
from consistent_kernels.blocks.v32 import project, project_index, project_out
from consistent_kernels.indexer import indexer_scores
from consistent_kernels.kv_cache_fp8 import (
    INDEXER,
    V32,
    gather_indexer_k,
    new_cache,
    write_kv_fp8,
)
from consistent_kernels.sparse_topk import sparse_topk
from train_bridge.blocks.ops import TrainableBlockOps
from train_bridge.blocks.packed_attention import PackedAttention
from train_bridge.blocks.packing import PackedSequences


def index_keys(k: torch.Tensor, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return index keys [n, 128] as a private cache gives them back: (e4m3 [n, 128], scale [n])."""
    count = len(k)
    cache = new_cache(max(1, -(-count // 64)), 64, INDEXER, k.device)
    places = torch.arange(count, dtype=torch.int32, device=k.device)
    write_kv_fp8(k, cache, places, layout=INDEXER, impl=impl)
    zero = torch.zeros(1, dtype=torch.int32, device=k.device)
    keys, scale = gather_indexer_k(cache, places[None], zero, starts=zero)
    return keys[0], scale[0]


class PackedV32Attention(PackedAttention):
    """The trainer's form: every sequence from position 0, fp32 masters, a private FP8 cache.

    No gradient flows into the indexer; its masters are buffers.
    """

    def __init__(
        self,
        params: V32Parameters,
        weights: dict[str, torch.Tensor],
        *,
        programs: BlockPrograms,
        backward: str = "own",
    ) -> None:
        """Take masters by the names of `v32_weight_shapes`; `backward` is of sparse attention."""
        super().__init__(v32_weight_shapes(params), weights, params, programs, backward)

    def _attend(
        self, ops: TrainableBlockOps, hidden: torch.Tensor, sequences: PackedSequences
    ) -> torch.Tensor:
        projected = project(ops, self.params, hidden, sequences.positions)
        selected = self._select(ops, hidden.detach(), projected.compressed_q.detach(), sequences)
        starts = sequences.starts.to(torch.int32).unsqueeze(1)
        indices = torch.where(selected >= 0, selected + starts, -1)
        latent = ops.attend(projected.query, projected.entry, indices, V32, self.params.scale)
        return project_out(ops, latent)

    @torch.no_grad()
    def _select(
        self,
        ops: BlockOps,
        hidden: torch.Tensor,
        compressed_q: torch.Tensor,
        sequences: PackedSequences,
    ) -> torch.Tensor:
        plain = BlockOps(ops.weights, self.programs)
        index = project_index(plain, self.params, hidden, compressed_q, sequences.positions)
        keys, scale = index_keys(index.k, self.programs.kv_cache)
        ends = sequences.starts + sequences.positions + 1
        scores = indexer_scores(
            index.q, index.weights, keys, scale, sequences.starts, ends, impl=self.programs.indexer
        )
        return sparse_topk(
            scores, sequences.starts, ends, self.params.topk, impl=self.programs.topk
        )
