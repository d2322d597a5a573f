"""Which rank holds which experts."""

from __future__ import annotations

import dataclasses

import torch

from consistent_kernels.errors import invalid


@dataclasses.dataclass(frozen=True)
class ExpertPlacement:
    """Consecutive experts on consecutive ranks, vLLM's "linear" placement.

    Where the experts do not divide evenly, the first ranks hold one more.

    Attributes:
        num_experts: E.
        world_size: ranks that share them.
    """

    num_experts: int
    world_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= self.num_experts:
            raise invalid(
                "expert_parallel",
                "world_size",
                f"between 1 and num_experts={self.num_experts}",
                self.world_size,
            )

    def first(self, rank: int) -> int:
        """The first expert of a rank; of `world_size`, the number of experts.

        Raises:
            InvalidInputError: no such rank.
        """
        if not 0 <= rank <= self.world_size:
            raise invalid("expert_parallel", "rank", f"from 0 to {self.world_size - 1}", rank)
        base, extra = divmod(self.num_experts, self.world_size)
        return rank * base + min(rank, extra)

    def experts(self, rank: int) -> slice:
        """The experts of a rank.

        Raises:
            InvalidInputError: no such rank.
        """
        return slice(self.first(rank), self.first(rank + 1))

    def owners(self, ids: torch.Tensor) -> torch.Tensor:
        """The rank that holds each expert id, int64."""
        firsts = torch.tensor(
            [self.first(rank) for rank in range(1, self.world_size)],
            dtype=torch.int64,
            device=ids.device,
        )
        return torch.bucketize(ids.long(), firsts, right=True)
