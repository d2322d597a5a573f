"""Tells Megatron-Bridge, where it is installed, how our linears are split.

AutoMapping finds a module's parallelism by its class name. Source: megatron-bridge
0.6.2, `AutoMapping.register_module_type`.
"""

from __future__ import annotations

import importlib

from consistent_kernels.errors import UnsupportedError

_MODULE = "megatron.bridge.models.conversion.param_mapping"
MODULE_TYPES = {
    "VllmColumnParallelLinear": "column",
    "VllmLayerNormColumnParallelLinear": "column",
    "VllmOutputLayer": "column",
    "VllmVocabParallelEmbedding": "column",
    "VllmColumnParallelGroupedLinear": "column",
    "VllmRowParallelLinear": "row",
    "VllmRowParallelGroupedLinear": "row",
    "VllmRMSNorm": "replicated",
    "VllmTopKRouter": "replicated",
}
"""Class name to how Megatron-Bridge cuts its weight over TP ranks."""


def register_auto_mapping() -> None:
    """Register our module classes with Megatron-Bridge; again is harmless.

    Raises:
        UnsupportedError: Megatron-Bridge is not installed, or is another version that has no
            `AutoMapping.register_module_type`.
    """
    try:
        mapping = importlib.import_module(_MODULE).AutoMapping
        register = mapping.register_module_type
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            "register_auto_mapping", f"this Megatron-Bridge ({error})", ("megatron-bridge 0.6.2",)
        ) from error
    for name, kind in MODULE_TYPES.items():
        register(name, kind)
