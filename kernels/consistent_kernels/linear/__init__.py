"""y = x W^T + b with a fixed accumulation order."""

from consistent_kernels.linear.api import linear, linear_bwd, linear_packed, prepare_weight
from consistent_kernels.linear.packing import PackedWeight, pack_weight

__all__ = [
    "PackedWeight",
    "linear",
    "linear_bwd",
    "linear_packed",
    "pack_weight",
    "prepare_weight",
]
