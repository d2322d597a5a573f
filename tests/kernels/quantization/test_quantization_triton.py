"""The Triton program compiles for Hopper and Blackwell; interpreted, it equals the reference."""

from __future__ import annotations

import pytest
from interpreted import output_interpreted

from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_quantize_cross_compiles(arch: int, ue8m0: bool) -> None:
    from consistent_kernels.quantization import triton as kernels

    shared = {"GROUP": 128, "UE8M0": ue8m0}
    pointers = {"q_ptr": "*u8", "s_ptr": "*fp32"}
    rows = cross_compile(
        kernels._quantize_rows_fwd_kernel,
        arch=arch,
        signature={
            "x_ptr": "*bf16",
            **pointers,
            "x_stride": "i32",
            "s_row_stride": "i32",
            "s_column_stride": "i32",
        },
        constexprs={"K": 4096, "GROUPS": 32, "BLOCK": 16, **shared},
        enable_fp_fusion=False,
    )
    blocks = cross_compile(
        kernels._quantize_blocks_fwd_kernel,
        arch=arch,
        signature={"w_ptr": "*bf16", **pointers, "N": "i32", "w_stride": "i32"},
        constexprs={"K": 300, **shared},
        num_warps=8,
        enable_fp_fusion=False,
    )
    assert rows.startswith(b"\x7fELF")
    assert blocks.startswith(b"\x7fELF")


_INTERPRETED = """
import torch
import interpreted_fp8
from consistent_kernels.quantization.reference import quantize_blocks_ref, quantize_rows_ref
from consistent_kernels.quantization.triton import quantize_blocks_fwd, quantize_rows_fwd
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations

interpreted_fp8.install()
for dtype in (torch.bfloat16, torch.float32):
    x = hazard_activations((5, 300), seed=1, dtype=dtype)
    x[1, 5], x[2, 200], x[3, 130:] = -float("nan"), float("inf"), -0.0
    x[4] = 1e-12
    for scale_format in ("fp32", "ue8m0"):
        pairs = [
            (quantize_rows_fwd(x, scale_format, False), quantize_rows_ref(x, scale_format)),
            (quantize_rows_fwd(x, scale_format, True), quantize_rows_ref(x, scale_format)),
            (quantize_blocks_fwd(x, scale_format), quantize_blocks_ref(x, scale_format)),
        ]
        for (values, scale), (values_ref, scale_ref) in pairs:
            assert_bitwise_equal(scale, scale_ref)
            assert_bitwise_equal(values.view(torch.uint8), values_ref.view(torch.uint8))
print("done")
"""


def test_quantize_interpreted_equals_reference() -> None:
    assert output_interpreted(_INTERPRETED) == "done\n"
