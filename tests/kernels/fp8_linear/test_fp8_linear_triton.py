"""The Triton program compiles for Hopper and Blackwell, and interpreted is near the reference."""

from __future__ import annotations

import pytest
from interpreted import output_interpreted

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


_INTERPRETED = """
import interpreted_fp8
import torch
from consistent_kernels.fp8_linear.reference import fp8_gemm_ref
from consistent_kernels.fp8_linear.triton import fp8_gemm_fwd
from consistent_kernels.quantization import quantize_rows, quantize_weight
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations

interpreted_fp8.install()
for columns, inner in ((192, 384), (80, 200)):
    x = quantize_rows(
        hazard_activations((70, inner), seed=1), scale_format="fp32", impl="reference",
        tma_aligned=True,
    )
    weight = quantize_weight(
        hazard_activations((columns, inner), seed=2), scale_format="fp32", impl="reference"
    )
    actual = fp8_gemm_fwd(*x, *weight, torch.float32)
    # Scales of a row apart, and off a 16-byte boundary: the launcher's copy has other strides.
    wide = torch.full((70, 8), float("nan"))
    wide[:, 1 : 1 + x[1].shape[1]] = x[1]
    apart = fp8_gemm_fwd(x[0], wide[:, 1 : 1 + x[1].shape[1]], *weight, torch.float32)
    assert_bitwise_equal(apart, actual)
    expected = fp8_gemm_ref(*x, *weight, torch.float32)
    spread = x[1].double().repeat_interleave(128, 1)[:, :inner]
    w_spread = weight[1].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    magnitude = (x[0].double().abs() * spread) @ (
        weight[0].double().abs() * w_spread[:columns, :inner]
    ).t()
    # Both add 128 exact products in some order, then promote alike: see test_fp8_linear.py.
    bound = 2 * magnitude * (128 + 2 + 3) * 2**-24 * (1 + 2**-10)
    assert bool(((actual.double() - expected.double()).abs() <= bound).all())
# Small integers have exact sums in any order: the scales' roundings are left, bit for bit.
generator = torch.Generator().manual_seed(7)
q = [torch.randint(-2, 3, (n, 200), generator=generator).float() for n in (70, 80)]
scales = [torch.rand(shape, generator=generator) + 0.5 for shape in ((70, 2), (1, 2))]
given = (q[0].to(torch.float8_e4m3fn), scales[0], q[1].to(torch.float8_e4m3fn), scales[1])
assert_bitwise_equal(fp8_gemm_fwd(*given, torch.float32), fp8_gemm_ref(*given, torch.float32))
print("done")
"""


def test_fp8_gemm_interpreted_is_near_the_reference() -> None:
    assert output_interpreted(_INTERPRETED) == "done\n"
