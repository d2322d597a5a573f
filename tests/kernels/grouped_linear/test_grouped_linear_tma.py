"""The grouped linear's TMA kernel: addresses interpreted, compilation, bits on a GPU."""

from __future__ import annotations

import pytest
import torch
from interpreted import output_interpreted

from consistent_kernels.grouped_linear import grouped_linear
from consistent_kernels.grouped_linear.spec import TILES_BY_INNER, TmaTile
from consistent_kernels.grouped_linear.triton_tma import fits
from consistent_kernels.linear.probe import probe_inputs
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile

CHOSEN = {tile for _, tiles in TILES_BY_INNER for _, tile in tiles if isinstance(tile, TmaTile)}
TILES = [*sorted(CHOSEN, key=str), TmaTile(64, 128, 64, 4, 3, resident=2)]

INTERPRETED = """
import torch
from consistent_kernels.grouped_linear.spec import TmaTile
from consistent_kernels.grouped_linear.triton_tma import launch
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations

# fp16: the interpreter multiplies bf16 as the integers that hold it.
weight = hazard_activations((3, 64, 64), seed=2).half()
for rows in (1, 16, 70):
    wide = torch.full((rows, 3, 96), float("nan"), dtype=torch.float16)
    x = hazard_activations((rows, 3, 64), seed=rows).half()
    wide[..., :64] = x
    groups_first = x.transpose(0, 1).contiguous().transpose(0, 1)
    exact = torch.einsum("tgk,gnk->tgn", x.double(), weight.double())
    size = torch.einsum("tgk,gnk->tgn", x.double().abs(), weight.double().abs())
    bound = exact.abs() * 2**-10 + size * 64 * 2**-24 + 2**-24
    for tile in (TmaTile(32, 32, 32, 4, 2), TmaTile(16, 64, 64, 4, 2, resident=2)):
        y = launch(x, weight, tile)
        assert bool(((y.double() - exact).abs() <= bound).all()), (rows, tile)
        for view in (wide[..., :64], groups_first):
            assert_bitwise_equal(launch(view, weight, tile), y)
print("same")
"""


def test_grouped_linear_tma_interpreted_matches_reference() -> None:
    # Addresses, groups and the rows past the end; not the bits of a GPU's product.
    assert output_interpreted(INTERPRETED).strip() == "same"


def test_grouped_linear_tma_takes_whole_tiles() -> None:
    weight = torch.empty(2, 256, 128, dtype=torch.bfloat16)
    assert all(fits(tile, weight) for tile in TILES)
    assert not fits(TILES[0], weight[:, :192])
    assert not fits(TILES[0], weight[..., :64])
    assert not fits(TILES[0], weight.float())


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_grouped_linear_tma_cross_compiles(arch: int, tile: TmaTile) -> None:
    from consistent_kernels.grouped_linear.triton_tma import _grouped_linear_tma_fwd_kernel

    m, n, k = tile.block_m, tile.block_n, tile.block_k
    cubin = cross_compile(
        _grouped_linear_tma_fwd_kernel,
        arch=arch,
        signature={
            "x_desc": f"tensordesc<bf16[{m}, {k}]>", "w_desc": f"tensordesc<bf16[{n}, {k}]>",
            "y_desc": f"tensordesc<bf16[{m}, {n}]>", "M": "i32", "group_stride": "i32",
        },
        constexprs={
            "G": 128, "N": 512, "K": 128, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k,
            "PROGRAMS": 132 * tile.resident,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
    reason="TMA needs Hopper or later",
)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_grouped_linear_tma_equals_the_base_tile(tile: TmaTile) -> None:
    from consistent_kernels.grouped_linear.spec import BASE_TILE
    from consistent_kernels.grouped_linear.triton import launch
    from consistent_kernels.grouped_linear.triton_tma import launch as launch_tma

    for rows in (1, 64, 65, 300):
        parts = probe_inputs(rows, 256, 128, torch.bfloat16)
        x, weight = (torch.stack((part, part.flip(0))).cuda() for part in parts)
        wide = hazard_activations((rows, 2, 192), seed=1, device="cuda").fill_(float("nan"))
        wide[..., :128] = x.transpose(0, 1)
        expected = launch(x.transpose(0, 1), weight, BASE_TILE)
        assert_bitwise_equal(launch_tma(wide[..., :128], weight, tile), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tiles are of the CUDA program")
@pytest.mark.parametrize(("columns", "inner"), [(512, 128), (128, 512), (1024, 4096)])
def test_grouped_linear_tiles_keep_a_rows_bits(columns: int, inner: int) -> None:
    """On both sides of every change of tiles; halves of K cancel, so bf16 hides no order."""
    parts = probe_inputs(600, columns, inner, torch.bfloat16)
    x, weight = (torch.stack((part, part.flip(0))).cuda() for part in parts)
    x = x.transpose(0, 1)
    whole = grouped_linear(x, weight, impl="triton")
    for rows in (1, 17, 64, 65, 256, 257):
        for first in (0, 600 - rows):
            part = slice(first, first + rows)
            assert_bitwise_equal(grouped_linear(x[part], weight, impl="triton"), whole[part])
