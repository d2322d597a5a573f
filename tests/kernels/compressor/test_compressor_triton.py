"""The Triton programs of the compressor: compiled for absent GPUs, and interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from interpreted import output_interpreted

from consistent_kernels.compressor import CompressorParameters
from consistent_kernels.compressor.spec import num_warps
from consistent_kernels.compressor.triton import (
    _compress_fwd_kernel,
    _compress_to_cache_kernel,
    _launch_facts,
    _write_state_kernel,
)
from consistent_kernels.kv_cache_fp8 import INDEXER, V4
from consistent_kernels.kv_cache_fp8.triton import write_constants
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile, stack_bytes

SIGNATURE = {
    "state_ptr": "*fp32", "rows_ptr": "*i32", "positions_ptr": "*i64", "weight_ptr": "*bf16",
    "cos_ptr": "*fp32", "sin_ptr": "*fp32", "norm_eps": "fp32", "max_position": "i32",
}  # fmt: skip
FORMS = pytest.mark.parametrize(
    ("ratio", "overlap", "size"), [(4, True, 512), (128, False, 512), (4, True, 128)]
)


def facts(ratio: int, overlap: bool, size: int) -> dict[str, Any]:
    params = CompressorParameters(ratio, overlap, size, 1e-6)
    return _launch_facts(params, half=32)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@FORMS
def test_compressor_cross_compiles(
    arch: int, ratio: int, overlap: bool, size: int, tmp_path: Path
) -> None:
    constexprs = facts(ratio, overlap, size)
    cubin = cross_compile(
        _compress_fwd_kernel,
        arch=arch,
        signature=SIGNATURE | {"out_ptr": "*bf16"},
        num_warps=constexprs.pop("num_warps"),
        constexprs=constexprs,
        enable_fp_fusion=False,
    )
    assert stack_bytes(cubin, tmp_path) == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
@FORMS
def test_compress_to_cache_cross_compiles(
    arch: int, ratio: int, overlap: bool, size: int, tmp_path: Path
) -> None:
    constexprs = facts(ratio, overlap, size)
    quantized = write_constants(V4 if size == 512 else INDEXER, 64, "ue8m0")
    quantized["QUANT_GROUP"] = quantized.pop("GROUP")
    cubin = cross_compile(
        _compress_to_cache_kernel,
        arch=arch,
        signature=SIGNATURE | {"cache_ptr": "*u8", "slots_ptr": "*i64", "block_stride": "i32"},
        num_warps=constexprs.pop("num_warps"),
        constexprs=constexprs | quantized,
        enable_fp_fusion=False,
    )
    assert stack_bytes(cubin, tmp_path) == 0


@triton.jit
def _wide_kernel(x_ptr, out_ptr):
    at = tl.arange(0, 16384)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x - tl.max(x, 0))


def test_control_stack_bytes_sees_a_spill(tmp_path: Path) -> None:
    cubin = cross_compile(
        _wide_kernel,
        arch=90,
        signature={"x_ptr": "*fp32", "out_ptr": "*fp32"},
        constexprs={},
        num_warps=1,
    )
    assert stack_bytes(cubin, tmp_path) > 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_write_compressor_state_cross_compiles(arch: int) -> None:
    cubin = cross_compile(
        _write_state_kernel,
        arch=arch,
        signature={
            "kv_score_ptr": "*fp32", "bias_ptr": "*fp32", "positions_ptr": "*i64",
            "slots_ptr": "*i64", "cache_ptr": "*fp32", "stride": "i32",
        },
        constexprs={"RATIO": 4, "W": 1024, "BLOCK": 1024},
        num_warps=num_warps(1024),
    )  # fmt: skip
    assert cubin.startswith(b"\x7fELF")


INTERPRETED = """
import interpreted_fp8
import torch
from kv_cases import poisoned_cache
from consistent_kernels.compressor import (
    CompressorParameters, compress, compress_to_cache, compressor_state, packed_windows,
)
from consistent_kernels.compressor.reference import compress_ref
from consistent_kernels.compressor.triton import compress_fwd, write_state_fwd
from consistent_kernels.grouped_linear import grouped_linear
from consistent_kernels.grouped_linear.triton import grouped_linear_fwd
from consistent_kernels.kv_cache_fp8 import INDEXER, V4, write_kv_fp8
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
# Formed and stored at once = formed, then stored.
interpreted_fp8.install()
for ratio, overlap, layout in ((4, True, V4), (4, True, INDEXER), (16, False, INDEXER)):
    size = layout.width
    rope = RopeParameters(head_dim=size, rotary_dim=64, theta=1e4, max_position=512)
    params = CompressorParameters(ratio, overlap, size, 1e-6)
    state = hazard_activations((37, 2 * params.state_width), seed=5, dtype=torch.float32)
    rows, first, _ = packed_windows(torch.tensor([0, 37]), params)
    weight = norm_weight(size, seed=6, dtype=torch.float32)
    slots = torch.arange(len(rows)).flip(0) * 2
    slots[0] = -1
    kwargs = {"rope": rope, "params": params, "impl": "triton"}
    caches = [poisoned_cache(3, 16, layout) for _ in range(3)]
    entries = compress(state, rows, first, weight, **kwargs)
    write_kv_fp8(entries, caches[0], slots, layout=layout, impl="triton")
    compress_to_cache(state, rows, first, weight, caches[1], slots, layout=layout, **kwargs)
    raw = [cache.as_strided((3 * cache.stride(0),), (1,)) for cache in caches]
    assert_bitwise_equal(raw[1], raw[0])
    assert not torch.equal(raw[1], raw[2])
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
