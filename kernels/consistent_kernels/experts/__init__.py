"""Expert MLPs of a mixture-of-experts layer, and the local sum of their results."""

from consistent_kernels.experts.api import (
    combine,
    expert_outputs,
    experts,
    experts_bwd,
    prepare_expert_weight,
)

__all__ = ["combine", "expert_outputs", "experts", "experts_bwd", "prepare_expert_weight"]
