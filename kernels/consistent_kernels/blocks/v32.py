"""DeepSeek-V3.2 attention, absorbed: projections shared by both forms, and the engine's form.

Source: arXiv 2512.02556; vLLM 0.25.1 `models/deepseek_v2.py` (DeepseekV2MLAAttention, Indexer).
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
    ROPE,
    BlockPrograms,
    V32Parameters,
    v32_weight_shapes,
)
from consistent_kernels.blocks.workspace import EntryWorkspace
from consistent_kernels.indexer import indexer_scores_paged, quantize_indexer_q
from consistent_kernels.kv_cache_fp8 import (
    INDEXER,
    V32,
    new_cache,
    write_kv_fp8,
)
from consistent_kernels.sparse_topk import sparse_topk


@dataclasses.dataclass(frozen=True)
class Projections:
    """What tokens bring to the attention.

    Attributes:
        query: [T, H, 576] absorbed; entry: [T, 576] to be cached.
        compressed_q: [T, q_rank], which the indexer reads too.
    """

    query: torch.Tensor
    entry: torch.Tensor
    compressed_q: torch.Tensor


@dataclasses.dataclass(frozen=True)
class IndexInputs:
    """What tokens bring to the indexer: e4m3 queries, folded fp32 weights, bf16 keys [T, 128]."""

    q: torch.Tensor
    weights: torch.Tensor
    k: torch.Tensor


def project(
    ops: BlockOps, params: V32Parameters, hidden: torch.Tensor, positions: torch.Tensor
) -> Projections:
    """Form queries and cache entries.

    Args:
        hidden: [T, hidden] in the model dtype; positions: [T].
    """
    tokens = hidden.shape[0]
    compressed = ops.rms_norm(ops.linear(hidden, "q_a"), "q_norm", params.norm_eps)
    q = ops.linear(compressed, "q_b").view(tokens, params.heads, params.nope_dim + ROPE)
    q_rope = ops.interleaved_rotary(positions, q[..., params.nope_dim :], params.rope)
    latent = ops.grouped_linear(q[..., : params.nope_dim], "k_up")
    kv = ops.linear(hidden, "kv_a")
    entry = ops.rms_norm(kv[:, :LATENT].contiguous(), "kv_norm", params.norm_eps)
    k_rope = ops.interleaved_rotary(positions, kv[:, None, LATENT:], params.rope)
    return Projections(
        torch.cat((latent, q_rope), dim=-1), torch.cat((entry, k_rope[:, 0]), dim=-1), compressed
    )


def project_index(
    ops: BlockOps,
    params: V32Parameters,
    hidden: torch.Tensor,
    compressed_q: torch.Tensor,
    positions: torch.Tensor,
) -> IndexInputs:
    """Form the indexer's inputs; no gradient flows through them."""
    q = ops.linear(compressed_q, "index_q").view(-1, params.index_heads, INDEX_DIM)
    k = ops.layer_norm(ops.linear(hidden, "index_k"), "index_norm", params.index_norm_eps)
    q, k = ops.rotary(positions, q, k.unsqueeze(1), params.index_rope)
    q8, weights = quantize_indexer_q(
        q,
        ops.linear(hidden, "index_weights"),
        softmax_scale=INDEX_DIM**-0.5,
        head_scale=params.index_heads**-0.5,
        impl=ops.programs.other,
    )
    return IndexInputs(q8, weights, k[:, 0])


def project_out(ops: BlockOps, latent: torch.Tensor) -> torch.Tensor:
    """Bring attention's output [T, H, 512] back to [T, hidden]."""
    return ops.linear(ops.grouped_linear(latent, "v_up").flatten(1), "out")


class PagedV32Attention:
    """The engine's form: paged FP8 caches; one path for prefill, chunks and decode."""

    def __init__(
        self,
        params: V32Parameters,
        weights: Mapping[str, torch.Tensor],
        *,
        programs: BlockPrograms,
        blocks: int,
        max_seq_len: int,
        block_size: int = 64,
        queries: int = 256,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the caches and the workspace.

        Args:
            weights: by the names of `v32_weight_shapes`, on `device`.
            programs: the implementation of each op.
            blocks, block_size: pages of the caches and tokens of a page.
            max_seq_len: longest context of any batch.
            queries: whose entries the workspace holds at a time; a step of more goes in pieces,
                which moves no bit. Not used where attention reads the pages ("fp8").

        Raises:
            InvalidInputError: a weight is missing, unknown or misshapen.
        """
        require_sizes(
            "PagedV32Attention", blocks, block_size, max_seq_len, params.rope.max_position
        )
        check_weights("PagedV32Attention", weights, v32_weight_shapes(params))
        self.params = params
        self.ops = BlockOps(weights, programs)
        self.ops.prepare(
            ("q_a", "q_b", "kv_a", "out", "index_q", "index_k", "index_weights"),
            (),
            ("q_norm", "kv_norm", "k_up", "v_up"),
            ("index_norm", "index_norm_bias"),
        )
        self.max_seq_len = max_seq_len
        self.workspace = None
        if programs.read == "workspace":
            self.workspace = EntryWorkspace(V32, queries, params.topk, device)
        self.cache = new_cache(blocks, block_size, V32, device)
        self.index_cache = new_cache(blocks, block_size, INDEXER, device)

    def forward(self, hidden: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Store the tokens and attend.

        Args:
            hidden: [T, hidden] bf16.
            batch: of the same T tokens; a request's earlier tokens have been stored.

        Returns:
            [T, hidden] bf16; a padded row holds anything.

        Raises:
            InvalidInputError: the batch allows longer contexts than the block was made for.
        """
        batch.require_within(
            "PagedV32Attention", hidden, self.params.hidden, self.ops.dtype, self.cache.shape[1],
            self.max_seq_len,
        )  # fmt: skip
        params, kv = self.params, self.ops.programs.kv_cache
        projected = project(self.ops, params, hidden, batch.positions)
        index = project_index(self.ops, params, hidden, projected.compressed_q, batch.positions)
        write_kv_fp8(projected.entry, self.cache, batch.slots, layout=V32, impl=kv)
        write_kv_fp8(index.k, self.index_cache, batch.slots, layout=INDEXER, impl=kv)
        seen = (batch.positions + 1).to(torch.int32)
        scores = indexer_scores_paged(
            index.q, index.weights, self.index_cache, batch.block_table, batch.requests, seen,
            columns=batch.max_seq_len, impl=self.ops.programs.indexer,
        )  # fmt: skip
        selected = sparse_topk(
            scores, torch.zeros_like(seen), seen, params.topk, impl=self.ops.programs.topk
        )
        return project_out(self.ops, self._attend(projected.query, selected, batch))

    def _attend(
        self, query: torch.Tensor, selected: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        scale = self.params.scale
        if self.ops.programs.read == "fp8":
            slots = batch.physical(selected)
            return self.ops.sparse_attention_fp8(query, self.cache, slots, scale)
        return self.workspace.attend(
            query,
            [(self.cache, selected)],
            batch,
            self.ops.programs.kv_cache,
            lambda *piece, out: self.ops.sparse_attention(*piece, scale, LATENT, None, out),
            LATENT,
        )
