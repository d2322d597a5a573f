"""Which experts serve a token, and with which weights."""

from consistent_kernels.router.api import hash_expert_ids, router, router_bwd
from consistent_kernels.router.parameters import RouterParameters

__all__ = ["RouterParameters", "hash_expert_ids", "router", "router_bwd"]
