"""The Triton programs of the compressor: compiled for absent GPUs, and interpreted."""

from __future__ import annotations

import pytest
from interpreted import output_interpreted

from consistent_kernels.compressor.spec import GROUP, NUM_WARPS
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (128, False)])
def test_compressor_cross_compiles(arch: int, ratio: int, overlap: bool) -> None:
    from consistent_kernels.compressor.triton import _compress_fwd_kernel, _write_state_kernel

    width = 1024 if overlap else 512
    cubin = cross_compile(
        _compress_fwd_kernel,
        arch=arch,
        signature={
            "state_ptr": "*fp32", "rows_ptr": "*i32", "positions_ptr": "*i64",
            "weight_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": "*bf16",
            "norm_eps": "fp32", "max_position": "i32",
        },
        constexprs={
            "TOKENS": ratio * (2 if overlap else 1), "RATIO": ratio, "OVERLAP": overlap, "D": 512,
            "W": width, "HALF": 32, "GROUP": GROUP, "GROUP_LEVELS": 3, "LEVELS": 9,
        },
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    assert cubin.startswith(b"\x7fELF")
    cubin = cross_compile(
        _write_state_kernel,
        arch=arch,
        signature={
            "kv_score_ptr": "*fp32", "bias_ptr": "*fp32", "positions_ptr": "*i64",
            "slots_ptr": "*i64", "cache_ptr": "*fp32", "stride": "i32", "ratio": "i32",
        },
        constexprs={"W": width, "BLOCK": width},
        num_warps=NUM_WARPS,
    )  # fmt: skip
    assert cubin.startswith(b"\x7fELF")


INTERPRETED = """
import torch
from consistent_kernels.compressor import CompressorParameters, compressor_state, packed_windows
from consistent_kernels.compressor.reference import compress_ref
from consistent_kernels.compressor.triton import compress_fwd, write_state_fwd
from consistent_kernels.grouped_linear import grouped_linear
from consistent_kernels.grouped_linear.triton import grouped_linear_fwd
from consistent_kernels.interleaved_rotary.reference import interleaved_rotary_ref
from consistent_kernels.interleaved_rotary.triton import interleaved_rotary_fwd
from consistent_kernels.rotary import RopeParameters, rope_tables
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations, norm_weight

rope = RopeParameters(head_dim=32, rotary_dim=16, theta=1e4, max_position=512)
tables = rope_tables(rope, "cpu")
for ratio, overlap in ((4, True), (32, False)):
    params = CompressorParameters(ratio, overlap, 32, 1e-6)
    kv_score = hazard_activations((70, 2 * params.state_width), seed=1, dtype=torch.float32)
    bias = torch.randn(ratio, params.state_width, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(70) % 37
    state = compressor_state(kv_score, bias, positions, impl="reference")
    slots = torch.arange(70).flip(0) * 2
    slots[3] = -1
    cache = torch.full((140, state.shape[1]), float("nan"))
    write_state_fwd(kv_score, bias, positions, cache, slots)
    kept = slots >= 0
    assert_bitwise_equal(cache[slots[kept]], state[kept])
    assert int(cache.isnan().all(1).sum()) == 71
    rows, first, _ = packed_windows(torch.tensor([0, 37, 70]), params)
    rows = torch.cat((rows, torch.full_like(rows[:1], -1)))
    first = torch.cat((first, first[:1]))
    arguments = (state, rows, first, norm_weight(32, seed=2, dtype=torch.float32), *tables, params)
    ours = compress_fwd(*arguments, torch.float32)
    expected = compress_ref(*arguments, torch.float32)
    assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)
    assert not bool(ours[-1].any())
# fp16, for the interpreter takes bf16 for integers; elementwise ops and copies have equal bits.
x = hazard_activations((5, 11, 32), seed=3, dtype=torch.float16)
places = torch.tensor([0, 3, 511, 7, 3])
for inverse in (False, True):
    assert_bitwise_equal(
        interleaved_rotary_fwd(places, x, *tables, inverse),
        interleaved_rotary_ref(places, x, *tables, inverse),
    )
x = hazard_activations((3, 2, 72), seed=4, dtype=torch.float16)
weight = torch.randn(2, 70, 72, generator=torch.Generator().manual_seed(1)).half() * 0.1
error = grouped_linear_fwd(x, weight).float() - grouped_linear(x, weight, impl="reference").float()
size = torch.einsum("tgk,gnk->tgn", x.float().abs(), weight.float().abs())
assert bool((error.abs() <= size * 2**-11).all())
print("equal")
"""


def test_compressor_interpreted_matches_reference() -> None:
    assert output_interpreted(INTERPRETED).strip() == "equal"
