"""One linear a group of columns: MLA's absorbed projections and V4's grouped output projection."""

from consistent_kernels.grouped_linear.api import grouped_linear, grouped_linear_bwd

__all__ = ["grouped_linear", "grouped_linear_bwd"]
