"""Experts spread over the ranks of vLLM's expert-parallel group (data parallel engines)."""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_ep_group

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.expert_parallel import AllToAll, ExpertPlacement


def held_experts(layer: Any) -> slice:
    """Return the experts whose weights vLLM's RoutedExperts `layer` holds.

    Raises:
        UnsupportedError: they are not the consecutive ones of `ExpertPlacement`.
    """
    total = layer.global_num_experts
    if not layer.use_ep:
        return slice(0, total)
    config = layer.moe_config.moe_parallel_config
    held = ExpertPlacement(total, config.ep_size).experts(config.ep_rank)
    found = (layer.expert_map >= 0).nonzero()[:, 0].tolist()
    if found != list(range(held.start, held.stop)):
        raise UnsupportedError(
            f"expert placement {layer.expert_placement_strategy!r} of {layer.layer_name}",
            f"experts {found} on rank {config.ep_rank} of {config.ep_size}",
            [f"experts {held.start} to {held.stop - 1} (expert_placement_strategy='linear')"],
        )
    return held


ExpertRanks = tuple[AllToAll, ExpertPlacement]
"""How rows reach the experts of other ranks, and who holds which."""


def expert_ranks(layer: Any) -> ExpertRanks | None:
    """Return the ranks that share the experts of RoutedExperts `layer`; None where one has all.

    Every rank of the group must run every layer as often as the others: vLLM's data parallel
    engines do, with dummy batches where one has no request.
    """
    if not layer.use_ep:
        return None
    held_experts(layer)
    group = get_ep_group()
    exchange = AllToAll(group.device_group)
    return exchange, ExpertPlacement(layer.global_num_experts, group.world_size)
