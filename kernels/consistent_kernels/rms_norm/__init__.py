"""RMSNorm, with and without a residual addition."""

from consistent_kernels.rms_norm.api import add_rms_norm, rms_norm, rms_norm_bwd

__all__ = ["add_rms_norm", "rms_norm", "rms_norm_bwd"]
