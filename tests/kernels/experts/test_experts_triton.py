"""The Triton program of the experts: compiled for GPUs that are not here, and interpreted."""

from __future__ import annotations

import pytest
from interpreted import output_interpreted

from consistent_kernels.experts.spec import (
    BASE_TILE,
    COMBINE_BLOCK,
    NUM_WARPS,
    SORT_BLOCKS,
    TILES_BY_ROWS,
    GroupedTile,
)
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

INTERPRETED = """
import torch
from expert_cases import SHAPES, prepared, routing, tokens
from consistent_kernels.experts import experts
from consistent_kernels.experts.spec import GroupedTile
from consistent_kernels.experts.triton import combine_fwd, outputs_with_tile
from consistent_kernels.experts.triton_layout import expert_layout
from consistent_kernels.experts.deep_gemm_places import Places
from consistent_kernels.experts.deep_gemm_rows import combine_places
from consistent_kernels.experts.reference import combine_ref
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal

fp16 = torch.float16
for name in ("tiny", "ragged"):
    shape = SHAPES[name]
    w13, w2 = prepared(shape, "reference", "cpu", dtype=fp16)
    for rows, tile in ((1, GroupedTile(16, 32, 32, 4, 2)), (37, GroupedTile(16, 32, 64, 4, 2))):
        x = tokens(shape, rows, "cpu", seed=1, dtype=fp16).clamp(-8, 8)
        ids, weights = routing(shape, rows, "cpu", seed=2)
        shared = tokens(shape, rows, "cpu", seed=3, dtype=fp16).clamp(-8, 8)
        for limit in (None, 0.5):
            expected = experts(x, w13, w2, ids, weights, shared, limit=limit, impl="reference")
            for layout in ("contiguous", "masked"):
                y = outputs_with_tile(x, w13.half(), w2.half(), ids, limit, layout, tile)
                y[ids < 0] = float("nan")
                out = combine_fwd(y, ids, weights, shared)
                # fp16 roundings of gate, up, hidden and y may fall on the other side of a tie.
                torch.testing.assert_close(out, expected, rtol=2**-9, atol=2**-9)
# The layout itself, with counts on both sides of a tile and of a block of the scan.
generator = torch.Generator().manual_seed(5)
for rows in (1, 16, 17, 1500, 8193):
    ids = torch.randint(-1, 7, (rows,), generator=generator).int()
    ids[ids == 3] = 2
    for capacity in (None, rows):
        layout = expert_layout(ids, 7, 16, capacity=capacity)
        seen = []
        for e, first, end in zip(layout.tile_expert, layout.tile_start, layout.tile_end):
            if e >= 0:
                places = range(int(first), min(int(first) + 16, int(end)))
                assert len(places) > 0
                seen += [(int(layout.order[p]), int(e)) for p in places]
        expected = [(i, int(e)) for i, e in enumerate(ids.tolist()) if e >= 0]
        assert sorted(seen) == expected, (rows, capacity)
# The sums of both launchers, bit for bit: slots 0 and 2 cancel, so that the order shows.
generator = torch.Generator().manual_seed(6)
y, shared = (torch.randn(shape, generator=generator) for shape in ((9, 4, 72), (9, 72)))
y[:, 2] = y[:, 0]
weights = torch.tensor([[2.0**14, 0.3, -(2.0**14), 0.7]]).repeat(9, 1)
ids = torch.arange(36).view(9, 4) % 5
ids[4], ids[5, 1] = -1, -1
expected = combine_ref(y, ids, weights, shared)
assert_bitwise_equal(combine_fwd(y, ids, weights, shared), expected)
place = torch.where(ids < 0, -1, torch.arange(36).view(9, 4)).int().flatten()
places = Places(place, place, place, None)
assert_bitwise_equal(combine_places(y.view(36, 72), places, weights, shared), expected)
for order in ([3, 2, 1, 0], [0, 2, 1, 3]):
    other = combine_ref(y[:, order], ids[:, order], weights[:, order], shared)
    assert not bitwise_equal(other, expected), "another order shows"
print("same")
"""


def test_experts_interpreted_matches_reference() -> None:
    # Triton's interpreter runs the kernels in NumPy (fp16: it takes bf16 for integers): addresses,
    # masks, layouts and slots, not a GPU's bits.
    assert output_interpreted(INTERPRETED).strip() == "same"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tile", sorted({BASE_TILE, *(t for _, t in TILES_BY_ROWS)}, key=str))
def test_grouped_linear_cross_compiles(arch: int, gated: bool, tile: GroupedTile) -> None:
    from consistent_kernels.experts.triton import _grouped_linear_fwd_kernel

    pointers = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*bf16")
    indices = ("order_ptr", "tile_expert_ptr", "tile_start_ptr", "tile_end_ptr")
    numbers = dict.fromkeys(("N", "x_stride", "y_stride", "slots"), "i32") | {"limit": "fp32"}
    cubin = cross_compile(
        _grouped_linear_fwd_kernel,
        arch=arch,
        signature=pointers | dict.fromkeys(indices, "*i32") | numbers,
        constexprs={
            "K": 2048 if gated else 768,
            "GATED": gated,
            "HAS_LIMIT": gated,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.columns(gated),
            "BLOCK_K": tile.block_k,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("block", "warps"), [pick[1:] for pick in SORT_BLOCKS])
def test_expert_layout_cross_compiles(arch: int, masked: bool, block: int, warps: int) -> None:
    from consistent_kernels.experts.triton_layout import _expert_layout_kernel

    pointers = ("ids_ptr", "order_ptr", "tile_expert_ptr", "tile_start_ptr", "tile_end_ptr")
    cubin = cross_compile(
        _expert_layout_kernel,
        arch=arch,
        signature=dict.fromkeys(pointers, "*i32")
        | dict.fromkeys(("rows", "capacity", "max_tiles"), "i32"),
        constexprs={"MASKED": masked, "BLOCK_M": BASE_TILE.block_m, "BLOCK": block},
        num_warps=warps,
    )
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_combine_cross_compiles(arch: int) -> None:
    from consistent_kernels.experts.triton import _combine_fwd_kernel

    signature = {
        "y_ptr": "*bf16",
        "ids_ptr": "*i32",
        "weights_ptr": "*fp32",
        "shared_ptr": "*bf16",
        "out_ptr": "*bf16",
        "H": "i32",
        "shared_stride": "i32",
    }
    cubin = cross_compile(
        _combine_fwd_kernel,
        arch=arch,
        signature=signature,
        constexprs={"K": 8, "HAS_SHARED": True, "BLOCK": COMBINE_BLOCK},
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    assert cubin.startswith(b"\x7fELF")
