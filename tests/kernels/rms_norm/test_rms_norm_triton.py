"""The Triton program compiles for Hopper and Blackwell on a machine without a GPU."""

from __future__ import annotations

import pytest

from consistent_kernels.rms_norm.spec import num_warps
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("columns", [576, 4096, 5120])
def test_rms_norm_cross_compiles(arch: int, has_residual: bool, columns: int) -> None:
    from consistent_kernels.rms_norm.triton import _rms_norm_fwd_kernel

    cubin = cross_compile(
        _rms_norm_fwd_kernel,
        arch=arch,
        signature={
            "x_ptr": "*bf16",
            "residual_ptr": "*bf16",
            "weight_ptr": "*bf16",
            "y_ptr": "*bf16",
            "sum_ptr": "*bf16",
            "x_stride": "i32",
            "residual_stride": "i32",
            "eps": "fp32",
        },
        constexprs={"H": columns, "LANES": 256, "LEVELS": 8, "HAS_RESIDUAL": has_residual},
        num_warps=num_warps(columns),
        enable_fp_fusion=False,
    )
    assert cubin.startswith(b"\x7fELF")
