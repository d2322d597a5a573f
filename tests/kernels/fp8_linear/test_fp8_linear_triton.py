"""The Triton program compiles for Hopper and Blackwell on a machine without a GPU."""

from __future__ import annotations

import pytest

from consistent_kernels.fp8_linear import spec
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("columns", "inner", "out"), [(256, 512, "*bf16"), (80, 200, "*fp32")])
def test_fp8_gemm_cross_compiles(arch: int, columns: int, inner: int, out: str) -> None:
    from consistent_kernels.fp8_linear.triton import _fp8_gemm_fwd_kernel

    cubin = cross_compile(
        _fp8_gemm_fwd_kernel,
        arch=arch,
        signature={
            "x_ptr": "*fp8e4nv",
            "x_scale_ptr": "*fp32",
            "w_ptr": "*fp8e4nv",
            "w_scale_ptr": "*fp32",
            "y_ptr": out,
            "M": "i32",
            "s_row_stride": "i32",
            "s_column_stride": "i32",
        },
        constexprs={
            "N": columns,
            "K": inner,
            "BLOCK_M": spec.TILE_M,
            "BLOCK_N": spec.TILE_N,
            "BLOCK_K": spec.BLOCK_K,
            "GROUP": spec.GROUP_ROWS,
        },
        num_warps=spec.NUM_WARPS,
        num_stages=spec.NUM_STAGES,
        enable_fp_fusion=False,
    )
    assert cubin.startswith(b"\x7fELF")
