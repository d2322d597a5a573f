"""Patches of vLLM: the last resort, each with its reason, lines, signature check and removal.

Nothing here changes arithmetic: layers, attention and samplers are replaced through vLLM's own
extension points. Both patches only make refusals reach the caller.
"""

from vllm_consistent.patches.ledger import applied, apply_front_end, apply_requests

__all__ = ["applied", "apply_front_end", "apply_requests"]
