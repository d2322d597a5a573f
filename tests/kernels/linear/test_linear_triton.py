"""The Triton program compiles for Hopper and Blackwell on a machine without a GPU."""

from __future__ import annotations

import pytest

from consistent_kernels.linear.spec import BLOCK_K, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_WARPS
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("out", "has_bias"), [("*bf16", True), ("*bf16", False), ("*fp32", False)])
def test_linear_cross_compiles(arch: int, out: str, has_bias: bool) -> None:
    from consistent_kernels.linear.triton import _linear_fwd_kernel

    cubin = cross_compile(
        _linear_fwd_kernel,
        arch=arch,
        signature={
            "x_ptr": "*bf16",
            "w_ptr": "*bf16",
            "bias_ptr": "*bf16",
            "y_ptr": out,
            "M": "i32",
            "x_stride": "i32",
        },
        constexprs={
            "N": 960,
            "K": 576,
            "HAS_BIAS": has_bias,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": BLOCK_K,
        },
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    assert cubin.startswith(b"\x7fELF")
