"""The Triton program compiles for Hopper and Blackwell on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels.linear.schedule import GROUP_ROWS, TILES_BY_ROWS, TritonTile
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tile", [tile for _, tile in TILES_BY_ROWS], ids=str)
@pytest.mark.parametrize(("out", "has_bias"), [("*bf16", True), ("*fp32", False)])
def test_linear_cross_compiles(arch: int, out: str, has_bias: bool, tile: TritonTile) -> None:
    from consistent_kernels.linear.triton_kernel import _linear_fwd_kernel

    cubin = cross_compile(
        _linear_fwd_kernel,
        arch=arch,
        signature={
            "x_ptr": "*bf16",
            "w_ptr": "*bf16",
            "bias_ptr": "*bf16",
            "y_ptr": out,
            "M": "i32",
            "N": "i32",
            "x_stride": "i32",
        },
        constexprs={
            "K": 576,
            "HAS_BIAS": has_bias,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP": GROUP_ROWS,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inner", [200, 576, 4096])
def test_linear_tiles_give_equal_bits(inner: int) -> None:
    from consistent_kernels.linear.triton_tiles import tiles_with_equal_bits

    # A tile that fails here costs speed, not bits: it is never used.
    device = torch.device("cuda", torch.cuda.current_device())
    equal = tiles_with_equal_bits(inner, torch.bfloat16, device)
    assert equal == {tile for _, tile in TILES_BY_ROWS}
