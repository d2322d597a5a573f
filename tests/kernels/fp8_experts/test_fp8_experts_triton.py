"""The Triton program of FP8 experts compiles for Hopper and Blackwell on a machine without one."""

from __future__ import annotations

import pytest

from consistent_kernels.fp8_experts.spec import BLOCK_K, NUM_STAGES, NUM_WARPS, TILE_M, TILE_N
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("gated", [True, False])
def test_fp8_grouped_gemm_cross_compiles(arch: int, gated: bool) -> None:
    from consistent_kernels.fp8_experts.triton import _fp8_grouped_fwd_kernel

    pointers = {"x_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv", "y_ptr": "*bf16"}
    scales = dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32")
    indices = ("order_ptr", "tile_expert_ptr", "tile_start_ptr", "tile_end_ptr")
    numbers = dict.fromkeys(("s_row_stride", "s_column_stride", "slots"), "i32")
    cubin = cross_compile(
        _fp8_grouped_fwd_kernel,
        arch=arch,
        signature=pointers | scales | dict.fromkeys(indices, "*i32") | numbers | {"limit": "fp32"},
        constexprs={
            "N": 768 if gated else 2048,
            "K": 2048 if gated else 768,
            "GATED": gated,
            "HAS_LIMIT": gated,
            "BLOCK_M": TILE_M,
            "BLOCK_N": TILE_N,
            "BLOCK_K": BLOCK_K,
        },
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        enable_fp_fusion=False,
    )
    assert cubin.startswith(b"\x7fELF")
