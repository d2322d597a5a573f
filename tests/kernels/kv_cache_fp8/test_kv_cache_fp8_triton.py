"""The Triton program of the FP8 caches: compiled for GPUs that are not here, and interpreted."""

from __future__ import annotations

import pytest
import torch
from interpreted import output_interpreted
from kv_cases import POISON, hazard_rows, poisoned_cache

from consistent_kernels.kv_cache_fp8 import LAYOUTS, KVLayout, gather_kv_fp8, write_kv_fp8
from consistent_kernels.testing import assert_bitwise_equal
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the Triton program needs a CUDA device"
)
EACH_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@EACH_LAYOUT
def test_write_kv_fp8_cross_compiles(arch: int, layout: KVLayout) -> None:
    from consistent_kernels.kv_cache_fp8.triton import _constants, _write_kv_fp8_kernel

    cubin = cross_compile(
        _write_kv_fp8_kernel,
        arch=arch,
        signature={
            "kv_ptr": "*i16",
            "cache_ptr": "*u8",
            "slot_ptr": "*i64",
            "kv_stride": "i32",
            "block_stride": "i32",
        },
        constexprs=_constants(layout, 64)
        | {
            "GROUPS_PADDED": 1 << (layout.groups - 1).bit_length(),
            "SCALE_ROOM": layout.scale_room,
            "SCALE_FLOOR_LAST": layout.name == "v32",
            "UE8M0": layout.name != "v32",
        },
        enable_fp_fusion=False,
    )
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("paged", [True, False])
@EACH_LAYOUT
def test_gather_kv_fp8_cross_compiles(arch: int, layout: KVLayout, paged: bool) -> None:
    from consistent_kernels.kv_cache_fp8.spec import GATHER_WARPS
    from consistent_kernels.kv_cache_fp8.triton import (
        _constants,
        _gather_kv_fp8_kernel,
        gather_rows,
    )

    cubin = cross_compile(
        _gather_kv_fp8_kernel,
        arch=arch,
        signature={
            "cache_ptr": "*u8",
            "positions_ptr": "*i32",
            "requests_ptr": "*i32",
            "table_ptr": "*i32",
            "out_ptr": "*i16",
            "indices_ptr": "*i32",
        }
        | dict.fromkeys(("entries", "k", "table_stride", "block_stride"), "i32")
        | dict.fromkeys(("indices_stride", "first_row"), "i32"),
        constexprs=_constants(layout, 64)
        | {"PAGED": paged, "INDICES": paged, "ROWS": gather_rows(layout)}
        | {"DESCENDING": paged},
        num_warps=GATHER_WARPS,
        enable_fp_fusion=False,
    )
    assert cubin.startswith(b"\x7fELF")


INTERPRETED = """
import warnings
import interpreted_fp8
import torch
from kv_cases import hazard_rows, poisoned_cache
from consistent_kernels.kv_cache_fp8 import LAYOUTS, gather_kv_fp8, write_kv_fp8
from consistent_kernels.testing import assert_bitwise_equal

interpreted_fp8.install()
warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's word on infinity / infinity
generator = torch.Generator().manual_seed(1)
for layout in LAYOUTS.values():
    kv = hazard_rows(40, layout, seed=2)
    kv[5, 3], kv[6, 0], kv[7, 100] = float("nan"), float("inf"), -float("nan")
    slots = torch.randperm(80, generator=generator)[:40]
    slots[4] = -1
    table = torch.tensor([[4, 0, 3], [1, 2, 99]], dtype=torch.int32)
    positions = torch.randint(-1, 32, (3, 7), generator=generator).int()
    requests = torch.tensor([1, 0, 1])
    for scale_format in ("fp32", "ue8m0") if layout.name == "indexer" else (None,):
        found = []
        for impl in ("reference", "triton"):
            cache = poisoned_cache(5, 16, layout)
            write_kv_fp8(
                kv, cache, slots, layout=layout, impl=impl, scale_format=scale_format
            )
            gather = lambda **places: gather_kv_fp8(
                cache, positions, requests, layout=layout, impl=impl, **places
            )
            indices = torch.zeros((3, 9), dtype=torch.int32)
            rows = (
                gather(block_table=table, indices=indices[:, 1:8], first_row=100),
                gather(starts=torch.tensor([3, 40])),
            )
            found.append((cache.as_strided((5 * cache.stride(0),), (1,)), *rows, indices))
        for ours, expected in zip(found[1], found[0], strict=True):
            assert_bitwise_equal(ours, expected)
print("same")
"""


def test_kv_cache_fp8_interpreted_equals_reference() -> None:
    assert output_interpreted(INTERPRETED).strip() == "same"


@pytest.mark.gpu
@needs_cuda
@EACH_LAYOUT
def test_kv_cache_fp8_graph_replay_equals_eager(layout: KVLayout) -> None:
    kv = hazard_rows(40, layout, seed=3, device="cuda")
    cache = poisoned_cache(8, 16, layout, device="cuda")
    slots = torch.arange(40, dtype=torch.int64, device="cuda") + 3
    positions = torch.arange(40, dtype=torch.int32, device="cuda").view(5, 8) - 1
    requests = torch.zeros(5, dtype=torch.int32, device="cuda")
    starts = requests[:1] + 3

    def step() -> torch.Tensor:
        write_kv_fp8(kv, cache, slots, layout=layout, impl="triton")
        return gather_kv_fp8(
            cache, positions, requests, layout=layout, impl="triton", starts=starts
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (4, 5):
        # A padded row writes nothing and a padded entry reads nothing.
        kv.copy_(hazard_rows(40, layout, seed=seed))
        slots[-2:] = -1
        positions[-1] = -1
        cache.fill_(POISON)
        graph.replay()
        got = captured.clone(), cache.clone()
        cache.fill_(POISON)
        assert_bitwise_equal(got[0], step())
        assert_bitwise_equal(got[1], cache)
        assert not bool(got[0][-1].any())
