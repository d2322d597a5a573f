"""The Triton programs of the hyper-connection maps: compiled for absent GPUs, and interpreted."""

from __future__ import annotations

import pytest
from interpreted import output_interpreted

from consistent_kernels.hyper_connections.spec import (
    HIDDEN_BLOCK,
    K_PART,
    K_STEP,
    MAP_WARPS,
    MIX_WARPS,
    ROW_TILE,
)
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

FLOATS = {"norm_eps", "eps", "post_multiplier"}
BF16 = {"x_ptr", "y_ptr", "input_ptr", "out_ptr"}


def signature_of(kernel: object, constexprs: dict[str, object], bf16: set[str]) -> dict[str, str]:
    def kind(name: str) -> str:
        if name in bf16:
            return "*bf16"
        if name.endswith("_ptr"):
            return "*fp32"
        return "fp32" if name in FLOATS else "i32"

    return {name: kind(name) for name in kernel.arg_names if name not in constexprs}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_hyper_connections_cross_compile(arch: int) -> None:
    from consistent_kernels.hyper_connections import triton as kernels

    mix = {
        "K": 4 * 4096, "N": 24, "BLOCK_N": 32, "ROW_TILE": ROW_TILE, "K_PART": K_PART,
        "K_STEP": K_STEP, "STEP_LEVELS": 6,
    }  # fmt: skip
    maps = {
        "H": 4096, "S": 4, "STREAM_LEVELS": 2, "PARTS": 32, "PART_ROWS": 32,
        "PART_LEVELS": 5, "BLOCK_N": 32,
        "BLOCK_H": HIDDEN_BLOCK, "ITERATIONS": 20, "HAS_COMB": True,
    }  # fmt: skip
    post = {"H": 4096, "S": 4, "BLOCK_H": HIDDEN_BLOCK}
    for kernel, constexprs, warps in (
        (kernels._hc_mix_fwd_kernel, mix, MIX_WARPS),
        (kernels._hc_map_fwd_kernel, maps, MAP_WARPS),
        (kernels._hc_post_fwd_kernel, post, MAP_WARPS),
    ):
        cubin = cross_compile(
            kernel,
            arch=arch,
            signature=signature_of(kernel, constexprs, BF16),
            constexprs=constexprs,
            num_warps=warps,
            enable_fp_fusion=False,
        )
        assert cubin.startswith(b"\x7fELF")


INTERPRETED = """
import torch
from consistent_kernels.hyper_connections.reference import hc_head_ref, hc_post_ref, hc_pre_ref
from consistent_kernels.hyper_connections.triton import hc_map_fwd, hc_post_fwd
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations

g = torch.Generator().manual_seed(0)
streams, hidden = 4, 288  # 1,152 columns: two whole parts and a tail
# fp16, for the interpreter takes bf16 for integers.
x = hazard_activations((3, streams, hidden), seed=1, dtype=torch.float16)
y = hazard_activations((3, hidden), seed=2, dtype=torch.float16)
fn = torch.randn(24, streams * hidden, generator=g) * 0.05
scale, base = 1 + 0.2 * torch.randn(3, generator=g), 0.3 * torch.randn(24, generator=g)
numbers = (1e-6, 1e-6, 3, 2.0)
ours = hc_map_fwd(x, fn, scale, base, *numbers, has_comb=True)
expected = hc_pre_ref(x, fn, scale, base, *numbers)
# The mixes differ in the order of fp32 additions only; the maps amplify it a few times.
for actual, value, bound in zip(ours, expected, (2**-6, 1e-4, 1e-4), strict=True):
    assert torch.allclose(actual.float(), value.float(), rtol=bound, atol=1e-4)
assert_bitwise_equal(hc_post_fwd(y, x, *expected[1:]), hc_post_ref(y, x, *expected[1:]))
head = hc_map_fwd(x, fn[:4], scale[:1], base[:4], 1e-6, 1e-6, 1, 1.0, has_comb=False)[0]
value = hc_head_ref(x, fn[:4], scale[:1], base[:4], 1e-6, 1e-6)
assert torch.allclose(head.float(), value.float(), rtol=2**-6, atol=1e-4)
alone = hc_map_fwd(x[2:], fn, scale, base, *numbers, has_comb=True)
for actual, value in zip(alone, ours, strict=True):
    assert_bitwise_equal(actual, value[2:])
print("equal")
"""


def test_hyper_connections_interpreted_match_reference() -> None:
    assert output_interpreted(INTERPRETED).strip() == "equal"
