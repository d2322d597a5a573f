"""The Triton program compiles for Hopper and Blackwell on a machine without a GPU."""

from __future__ import annotations

import pytest

from consistent_kernels.rotary.spec import HEADS_PER_PROGRAM, NUM_WARPS
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("head_dim", "half", "has_norm"),
    [(64, 32, False), (128, 64, True), (128, 64, False), (96, 24, False)],
)
def test_rotary_cross_compiles(arch: int, head_dim: int, half: int, has_norm: bool) -> None:
    from consistent_kernels.rotary.triton import _rotary_fwd_kernel

    tensors = ("q_ptr", "k_ptr", "q_weight_ptr", "k_weight_ptr", "q_out_ptr", "k_out_ptr")
    block_half = 1 << (half - 1).bit_length()
    cubin = cross_compile(
        _rotary_fwd_kernel,
        arch=arch,
        signature={
            "positions_ptr": "*i64",
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "eps": "fp32",
            **dict.fromkeys(tensors, "*bf16"),
            **dict.fromkeys(("q_stride", "k_stride", "max_position"), "i32"),
        },
        constexprs={
            "Q_HEADS": 14,
            "K_HEADS": 2,
            "D": head_dim,
            "HALF": half,
            "HAS_NORM": has_norm,
            "HEADS": HEADS_PER_PROGRAM,
            "BLOCK_HALF": block_half,
            "BLOCK_REST": 1 << max(0, head_dim - 2 * half - 1).bit_length(),
            "LEVELS": block_half.bit_length() - 1,
        },
        num_warps=NUM_WARPS,
    )
    assert cubin.startswith(b"\x7fELF")
