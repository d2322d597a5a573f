"""y = x W^T on FP8 values, a scale per 128 columns of x and per 128 x 128 block of W."""

from consistent_kernels.fp8_linear.api import fp8_gemm, fp8_linear, fp8_linear_bwd, warm_up

__all__ = ["fp8_gemm", "fp8_linear", "fp8_linear_bwd", "warm_up"]
