"""Exchange through DeepEP's normal-mode dispatch, for the interconnects that it is built for.

This file has never been run: no wheel of `deep_ep` fits the pinned torch. It is written against
DeepEP's public Python interface (deepseek-ai/DeepEP, deep_ep/buffer.py, version 1.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from consistent_kernels.errors import UnsupportedError, invalid

_ALIGNMENT = 16
"""DeepEP moves rows in units of 16 bytes."""


class DeepEP:
    """Rows as tokens of one "expert" each: rank r is expert r, so each row goes to one rank.

    DeepEP's combine adds in its own order, hence it is not used: rows return through dispatch too.

    Args:
        group: an NCCL group.
        buffer_bytes: NVLink buffer, and as much again for RDMA where the group spans nodes.
        spans_nodes: whether it does.

    Raises:
        UnsupportedError: `deep_ep` is not installed.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, buffer_bytes: int = 1 << 30, spans_nodes: bool = False
    ) -> None:
        try:
            import deep_ep
        except ImportError:
            raise UnsupportedError(
                "expert_parallel", "DeepEP without the package deep_ep", ("AllToAll",)
            ) from None
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._buffer: Any = deep_ep.Buffer(group, buffer_bytes, buffer_bytes if spans_nodes else 0)

    def deliver(self, rows: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
        """See `consistent_kernels.expert_parallel.rows.Exchange`.

        Raises:
            InvalidInputError: a row is no multiple of 16 bytes.
        """
        if rows.dtype != torch.uint8 or rows.shape[1] % _ALIGNMENT:
            raise invalid(
                "expert_parallel (DeepEP)",
                "rows",
                f"torch.uint8 of a multiple of {_ALIGNMENT} bytes",
                f"{rows.dtype} of {rows.shape[1]}",
            )
        rank_of_row = destination[:, None].contiguous()
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
            rank_of_row, self.world_size
        )
        received, _, _, _, _, _ = self._buffer.dispatch(
            # bf16 is its name for two bytes: rows are copied, not converted.
            rows.contiguous().view(torch.bfloat16),
            topk_idx=rank_of_row,
            topk_weights=torch.ones_like(rank_of_row, dtype=torch.float32),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        return received.view(torch.uint8)
