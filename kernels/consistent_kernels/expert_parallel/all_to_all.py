"""Exchange through torch.distributed's all-to-all: gloo on CPU, NCCL on CUDA."""

from __future__ import annotations

import torch
import torch.distributed as dist

from consistent_kernels.errors import invalid


class AllToAll:
    """Rows by `all_to_all_single`, after one exchange of their counts.

    The counts are read on the host, so this cannot be captured in a CUDA graph.

    Args:
        group: the ranks that share the experts; the default group when None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def deliver(self, rows: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
        """See `consistent_kernels.expert_parallel.rows.Exchange`.

        Raises:
            InvalidInputError: rows are no bytes, or a destination is no rank.
        """
        if rows.dim() != 2 or rows.dtype != torch.uint8 or destination.shape != rows.shape[:1]:
            raise invalid(
                "expert_parallel",
                "rows",
                "[S, B] torch.uint8 with destination [S]",
                f"{tuple(rows.shape)} {rows.dtype} with {tuple(destination.shape)}",
            )
        counts = torch.bincount(destination, minlength=self.world_size)
        if counts.numel() > self.world_size:
            raise invalid(
                "expert_parallel",
                "destination",
                f"ranks below {self.world_size}",
                int(destination.max()),
            )
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        order = torch.sort(destination, stable=True).indices
        arrivals, departures = arriving.tolist(), counts.tolist()
        received = rows.new_empty((sum(arrivals), rows.shape[1]))
        dist.all_to_all_single(
            received,
            rows[order].contiguous(),
            output_split_sizes=arrivals,
            input_split_sizes=departures,
            group=self.group,
        )
        return received
