"""y = x W^T + b with a fixed accumulation order."""

from consistent_kernels.linear.api import linear, linear_bwd, prepare_weight

__all__ = ["linear", "linear_bwd", "prepare_weight"]
