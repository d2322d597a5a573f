"""silu(gate) * up with one rounding."""

from consistent_kernels.silu_and_mul.api import silu_and_mul, silu_and_mul_bwd

__all__ = ["silu_and_mul", "silu_and_mul_bwd"]
