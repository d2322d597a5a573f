"""The Triton program compiles for Hopper and Blackwell on a machine without a GPU."""

from __future__ import annotations

import pytest

from consistent_kernels.silu_and_mul.spec import BLOCK, NUM_WARPS
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_silu_and_mul_cross_compiles(arch: int) -> None:
    from consistent_kernels.silu_and_mul.triton import _silu_and_mul_fwd_kernel

    pointers = dict.fromkeys(("gate_ptr", "up_ptr", "y_ptr"), "*bf16")
    numbers = dict.fromkeys(("gate_stride", "up_stride", "columns"), "i32")
    cubin = cross_compile(
        _silu_and_mul_fwd_kernel,
        arch=arch,
        signature=pointers | numbers,
        constexprs={"BLOCK": BLOCK},
        num_warps=NUM_WARPS,
    )
    assert cubin.startswith(b"\x7fELF")
