"""The Triton program of FP8 experts on a machine without a GPU: compiled, and interpreted."""

from __future__ import annotations

import pytest
from interpreted import output_interpreted

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


_INTERPRETED = """
import interpreted_fp8
import torch
from expert_cases import Shape, masters, routing, tokens
from consistent_kernels.fp8_experts import fp8_expert_outputs, quantize_expert_weight
from consistent_kernels.fp8_experts import triton as program
from consistent_kernels.quantization.reference import quantize_rows_ref
from consistent_kernels.testing import assert_bitwise_equal

interpreted_fp8.install()
# The same bits as the Triton quantization, for less time.
program.quantize_rows = lambda x, *, scale_format, impl: quantize_rows_ref(x, scale_format)
shape = Shape(4, 2, 160, 128)
for rows, scale_format, limit in ((9, "fp32", None), (80, "ue8m0", 0.5)):
    x, (ids, _) = tokens(shape, rows, "cpu", seed=1), routing(shape, rows, "cpu", seed=2)
    w13, w2 = (
        quantize_expert_weight(w, scale_format=scale_format, impl="reference")
        for w in masters(shape, "cpu")
    )
    given = (w13.values, w13.scale, w2.values, w2.scale)
    routed = ids >= 0
    y, masked = (
        program.fp8_expert_outputs_fwd(x, *given, ids, limit, scale_format, layout)[routed]
        for layout in ("contiguous", "masked")
    )
    assert_bitwise_equal(masked, y)
    options = {"scale_format": scale_format, "limit": limit}
    expected = fp8_expert_outputs(x, w13, w2, ids, **options, impl="reference")[routed].float()
    other = fp8_expert_outputs(x, w13, w2, (ids + 1) % 4, **options, impl="reference")[routed]
    # Both quantize and round at the same points; a value near a tie goes to the neighbour now and
    # then: one e4m3 step of one of the 128 hidden values of a sum.
    error = (y.float() - expected).norm() / expected.norm()
    assert error < 2**-8, error
    assert (other.float() - expected).norm() / expected.norm() > 0.5, "another expert is seen"
print("done")
"""


def test_fp8_experts_interpreted_are_near_the_reference() -> None:
    assert output_interpreted(_INTERPRETED) == "done\n"
