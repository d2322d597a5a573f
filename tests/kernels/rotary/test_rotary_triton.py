"""The Triton program compiles for Hopper and Blackwell on a machine without a GPU."""

from __future__ import annotations

import pytest

from consistent_kernels.rotary.spec import NUM_WARPS
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (128, 64), (96, 24)])
def test_rotary_cross_compiles(arch: int, head_dim: int, half: int) -> None:
    from consistent_kernels.rotary.triton import _rotary_fwd_kernel

    numbers = ("q_stride", "k_stride", "num_q_heads", "num_k_heads", "max_position")
    cubin = cross_compile(
        _rotary_fwd_kernel,
        arch=arch,
        signature={
            "positions_ptr": "*i64",
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            **dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), "*bf16"),
            **dict.fromkeys(numbers, "i32"),
        },
        constexprs={
            "D": head_dim,
            "HALF": half,
            "BLOCK_HALF": 1 << (half - 1).bit_length(),
            "BLOCK_REST": 1 << max(0, head_dim - 2 * half - 1).bit_length(),
        },
        num_warps=NUM_WARPS,
    )
    assert cubin.startswith(b"\x7fELF")
