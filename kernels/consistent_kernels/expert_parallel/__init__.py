"""Experts spread over ranks: rows travel, arithmetic stays where it was."""

from consistent_kernels.expert_parallel.all_to_all import AllToAll
from consistent_kernels.expert_parallel.api import (
    expert_parallel_experts,
    expert_parallel_outputs,
    over_ranks,
)
from consistent_kernels.expert_parallel.placement import ExpertPlacement
from consistent_kernels.expert_parallel.rows import (
    Exchange,
    Travelled,
    dispatch,
    dispatch_slots,
    give_back,
    in_order_of,
)

__all__ = [
    "AllToAll",
    "Exchange",
    "ExpertPlacement",
    "Travelled",
    "dispatch",
    "dispatch_slots",
    "expert_parallel_experts",
    "expert_parallel_outputs",
    "give_back",
    "in_order_of",
    "over_ranks",
]
