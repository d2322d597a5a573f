"""Relations of the grouped linear: rows and groups alone, strides, fp64, compilation."""

from __future__ import annotations

import pytest
import torch
from grouped_linear_cases import COLUMNS, GROUPS, INNER, TOKENS
from interpreted import output_interpreted

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.grouped_linear import grouped_linear, grouped_linear_bwd, spec
from consistent_kernels.grouped_linear.spec import BASE_TILE, TILES_BY_ROWS, TmaTile, tiles_of
from consistent_kernels.linear.probe import probe_inputs
from consistent_kernels.linear.schedule import TritonTile
from consistent_kernels.testing import (
    BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    poisoned_rows,
    split_k_linear,
)
from consistent_kernels.testing.cross_compile import ARCHITECTURES, cross_compile
from train_bridge.functions.grouped_linear import GroupedLinearFunction

TILES = [tile for _, tile in TILES_BY_ROWS]


def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = hazard_activations((TOKENS, GROUPS, INNER), seed=1, device=device)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(GROUPS, COLUMNS, INNER, generator=generator) * INNER**-0.5
    return x, weight.bfloat16().to(device)


def test_grouped_linear_matches_reference(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x, weight = inputs(device)
    y = grouped_linear(x, weight, impl=impl)
    expected = torch.einsum("tgk,gnk->tgn", x.double(), weight.double())
    size = torch.einsum("tgk,gnk->tgn", x.double().abs(), weight.double().abs())
    # One rounding to bf16, and a sum of K fp32 terms in any order.
    bound = expected.abs() * 2**-8 + size * INNER * 2**-24
    assert bool(((y.double() - expected).abs() <= bound).all())


def test_grouped_linear_is_batch_invariant(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x, weight = inputs(device)
    whole = grouped_linear(x, weight, impl=impl)
    for rows in BATCH_SIZES[::2]:
        part = slice(TOKENS - rows, TOKENS)
        assert_bitwise_equal(grouped_linear(x[part], weight, impl=impl), whole[part])
    for group in range(GROUPS):
        one = slice(group, group + 1)
        alone = grouped_linear(x[:, one], weight[one], impl=impl)
        assert_bitwise_equal(alone, whole[:, one].contiguous())


def test_grouped_linear_ignores_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x, weight = inputs(device)
    buffer, rows = poisoned_rows(x, before=3, after=2)
    assert_bitwise_equal(
        grouped_linear(buffer, weight, impl=impl)[rows], grouped_linear(x, weight, impl=impl)
    )
    wide = x.new_full((TOKENS, GROUPS, INNER + 24), float("nan"))
    wide[..., :INNER] = x
    assert_bitwise_equal(
        grouped_linear(wide[..., :INNER], weight, impl=impl), grouped_linear(x, weight, impl=impl)
    )


def test_control_a_split_sum_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    # Halves of K that cancel: another order shows after the rounding to bf16, too.
    parts = probe_inputs(65, COLUMNS, INNER, torch.bfloat16)
    x, weight = (torch.stack((part, part.flip(0), -part)).to(device) for part in parts)
    x = x.transpose(0, 1)
    split = torch.stack([split_k_linear(x[:, g], weight[g], 5) for g in range(GROUPS)], dim=1)
    assert not bitwise_equal(split, grouped_linear(x, weight, impl=impl))


def test_grouped_linear_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x, weight = inputs(device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(
        lambda value: grouped_linear(value, weight, impl=impl), backend=backend, fullgraph=True
    )
    assert_bitwise_equal(compiled(x), grouped_linear(x, weight, impl=impl))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_grouped_linear_graph_replay_equals_eager() -> None:
    x, weight = inputs("cuda")
    eager = grouped_linear(x, weight, impl="triton")
    static = torch.full_like(x, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grouped_linear(static, weight, impl="triton")
    static[:50] = x[:50]
    graph.replay()
    assert_bitwise_equal(captured[:50], eager[:50])


def test_grouped_linear_grad_matches_reference(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x, weight = inputs(device)
    grad = hazard_activations((TOKENS, GROUPS, COLUMNS), seed=3, device=device)
    grad_x, grad_weight = grouped_linear_bwd(grad, x, weight, impl=impl)
    g, x64, w64 = grad.double(), x.double(), weight.double()
    for actual, formula, left, right, terms in (
        (grad_x, "tgn,gnk->tgk", g, w64, COLUMNS),
        (grad_weight, "tgn,tgk->gnk", g, x64, TOKENS),
    ):
        expected = torch.einsum(formula, left, right)
        size = torch.einsum(formula, left.abs(), right.abs())
        rounding = 2**-8 if actual.dtype == torch.bfloat16 else 0.0
        bound = expected.abs() * rounding + size * terms * 2**-24
        assert bool(((actual.double() - expected).abs() <= bound).all())


def test_grouped_linear_function_rounds_the_master() -> None:
    x, weight = inputs("cpu")
    master = weight.float().requires_grad_()
    y = GroupedLinearFunction.apply(x, master, "reference")
    assert_bitwise_equal(y, grouped_linear(x, weight, impl="reference"))
    y.float().sum().backward()
    assert master.grad.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tiles are of the CUDA program")
@pytest.mark.parametrize(("columns", "inner"), [(512, 128), (80, 208), (128, 512), (1024, 4096)])
def test_grouped_linear_tiles_have_equal_bits(columns: int, inner: int) -> None:
    """Where this fails the base tile serves all rows: right, but slower."""
    from consistent_kernels.grouped_linear.triton import _has_tma, tiles_with_equal_bits

    device = torch.device("cuda", torch.cuda.current_device())
    tiles = {tile for _, tile in tiles_of(columns, inner, _has_tma(device))}
    assert tiles_with_equal_bits(columns, inner, torch.bfloat16, device) == {BASE_TILE, *tiles}
    assert tiles_with_equal_bits(columns, inner, torch.float32, device) == {BASE_TILE}


def test_grouped_linear_takes_a_probed_tile_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from consistent_kernels.grouped_linear import triton as program

    few, many = (torch.zeros(rows, 2, 4096, dtype=torch.bfloat16) for rows in (64, 65))
    weight = torch.zeros(2, 80, 4096, dtype=torch.bfloat16)  # fits no other table
    monkeypatch.setattr(program, "tiles_with_equal_bits", lambda *args: {BASE_TILE, *TILES})
    assert [program.tile_for(x, weight) for x in (few, many)] == TILES
    monkeypatch.setattr(program, "tiles_with_equal_bits", lambda *args: {BASE_TILE, TILES[0]})
    assert [program.tile_for(x, weight) for x in (few, many)] == [TILES[0], BASE_TILE]


def test_grouped_linear_tiles_are_a_property_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    short: spec.TilesByRows = ((64, TmaTile(64, 64, 64, 4, 4)), (0, TmaTile(128, 128, 64, 8, 3)))
    longer: spec.TilesByRows = ((0, TritonTile(64, 128, 64, 4, 3)),)
    monkeypatch.setattr(spec, "TILES_BY_INNER", ((128, short), (512, longer)))
    assert tiles_of(512, 128, True) == short
    assert tiles_of(512, 128, False) == longer  # no TMA
    assert tiles_of(64, 128, True) == longer  # one of the tiles does not fit the columns
    assert tiles_of(512, 96, True) == longer  # nor the steps of K
    assert tiles_of(512, 512, True) == longer
    assert tiles_of(512, 513, True) == spec.TILES_BY_ROWS


def test_grouped_linear_tiles_serve_any_rows_and_fit_the_probe() -> None:
    for _, tiles in (*spec.TILES_BY_INNER, (0, spec.TILES_BY_ROWS)):
        limits = [limit for limit, _ in tiles]
        assert limits[-1] == 0
        assert limits[:-1] == sorted(limits[:-1])
        assert all(256 % tile.block_n == 0 for _, tile in tiles)


INTERPRETED = """
import torch
import consistent_kernels.grouped_linear.triton as program
from consistent_kernels.grouped_linear.spec import BASE_TILE, TILES_BY_ROWS
from consistent_kernels.testing import hazard_activations

for rows, inner in ((3, 128), (70, 208), (65, 72)):
    x = hazard_activations((rows, 2, inner + 16), seed=rows, dtype=torch.float32)[..., :inner]
    weight = hazard_activations((2, 80, inner), seed=inner, dtype=torch.float32)
    expected = torch.einsum("tgk,gnk->tgn", x.double(), weight.double())
    size = torch.einsum("tgk,gnk->tgn", x.double().abs(), weight.double().abs())
    for tile in (BASE_TILE, *(tile for _, tile in TILES_BY_ROWS)):
        y = program.launch(x, weight, tile)
        assert bool(((y.double() - expected).abs() <= size * inner * 2**-24).all()), tile
print("same")
"""


def test_grouped_linear_interpreted_matches_reference() -> None:
    # Addresses, masks and tiles; not the bits of a GPU's product.
    assert output_interpreted(INTERPRETED).strip() == "same"


@pytest.mark.parametrize("tile", [BASE_TILE, *TILES], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_grouped_linear_cross_compiles(arch: int, tile: TritonTile) -> None:
    from consistent_kernels.grouped_linear.triton import _grouped_linear_fwd_kernel

    cubin = cross_compile(
        _grouped_linear_fwd_kernel,
        arch=arch,
        signature={
            "x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "M": "i32", "x_stride": "i32",
            "group_stride": "i32",
        },
        constexprs={
            "G": 8, "N": 1024, "K": 4096, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    assert cubin.startswith(b"\x7fELF")


def test_grouped_linear_rejects_bad_inputs() -> None:
    x, weight = inputs("cpu")
    with pytest.raises(InvalidInputError, match=r"weight must be .*\(3, N, 208\)"):
        grouped_linear(x, weight[:, :, :100], impl="reference")
    with pytest.raises(InvalidInputError, match=r"x must be \[T, G, K\]"):
        grouped_linear(x.int(), weight, impl="reference")
    with pytest.raises(UnsupportedError, match="impl 'cuda' is not supported"):
        grouped_linear(x, weight, impl="cuda")
