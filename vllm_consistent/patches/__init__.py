"""Patches of vLLM: the last resort, each with its reason, lines, signature check and removal.

Nothing here changes arithmetic: layers, attention and samplers are replaced through vLLM's own
extension points. Both patches only make refusals reach the caller.
"""

import sys

from vllm_consistent.patches.ledger import applied, apply

__all__ = ["applied", "apply_front_end", "apply_requests"]


def apply_front_end() -> None:
    """Apply what the front end needs before it builds a configuration.

    Only where vLLM's engine arguments are loaded already: other processes build no configuration.
    """
    from vllm_consistent.patches.configuration_error import PATCH

    if PATCH.module in sys.modules:
        apply(PATCH)


def apply_requests() -> None:
    """Apply the request check; called by the configuration hook, so in the front end only."""
    from vllm_consistent.patches.request_check import PATCH

    apply(PATCH)
