"""Tiles of the grouped linear, and DeepGEMM's einsum, at the shapes of `benchmarks/ops`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import typer

from benchmarks.ops.case import Setting
from benchmarks.ops.cases import grouped_linear as cases
from benchmarks.schedules.group import Group
from consistent_kernels.deep_gemm_start import fill_operands, prepare
from consistent_kernels.errors import ConsistencyError
from consistent_kernels.grouped_linear import grouped_linear
from consistent_kernels.grouped_linear.spec import BASE_TILE, TmaTile
from consistent_kernels.linear.schedule import TritonTile

Run = Callable[[slice], torch.Tensor]

DEEP_GEMM = "deep_gemm"
ROWS = (64, 256, 4096)
TILES = {
    "v4 out_a": (
        *(TritonTile(64, 64, 128, 4, 4), TritonTile(64, 64, 64, 4, 6)),
        *(TritonTile(64, 128, 64, 4, 4), TritonTile(128, 64, 64, 4, 4)),
        *(TritonTile(128, 64, 128, 4, 3), TritonTile(128, 128, 64, 8, 4)),
        *(TritonTile(128, 128, 128, 8, 3), TritonTile(128, 256, 64, 8, 4)),
    ),
    "v32 k_up": (
        *(TritonTile(64, 64, 128, 4, 4), TritonTile(128, 128, 64, 8, 4)),
        *(TritonTile(64, 128, 64, 4, 2), TritonTile(128, 128, 64, 8, 2)),
        *(TritonTile(128, 128, 128, 8, 1), TritonTile(64, 256, 64, 8, 2)),
        *(TritonTile(64, 64, 128, 4, 1), TritonTile(64, 128, 128, 4, 1)),
        *(TritonTile(128, 64, 128, 4, 1), TritonTile(64, 256, 128, 8, 1)),
        TritonTile(128, 256, 64, 8, 2),
    ),
    "v32 v_up": (
        *(TritonTile(64, 64, 128, 4, 4), TritonTile(64, 64, 64, 4, 4)),
        *(TritonTile(64, 128, 64, 4, 3), TritonTile(64, 128, 128, 4, 2)),
        *(TritonTile(128, 64, 64, 4, 3), TritonTile(128, 128, 64, 8, 3)),
        *(TritonTile(128, 128, 64, 8, 4), TritonTile(128, 128, 128, 8, 2)),
    ),
}
"""Tiles worth a try, besides the base tile and what the rows choose."""

TMA_TILES = {
    "v4 out_a": (
        *(TmaTile(64, 64, 128, 4, 5), TmaTile(64, 64, 64, 4, 10), TmaTile(64, 128, 64, 4, 7)),
        *(TmaTile(128, 64, 64, 4, 7), TmaTile(128, 128, 64, 8, 6), TmaTile(128, 128, 128, 8, 3)),
        TmaTile(128, 256, 64, 8, 3),
    ),
    "v32 k_up": (
        *(TmaTile(64, 128, 128, 4, 2, 2), TmaTile(64, 256, 128, 4, 2), TmaTile(64, 256, 64, 4, 4)),
        *(TmaTile(128, 128, 128, 8, 2), TmaTile(128, 128, 128, 8, 3), TmaTile(128, 256, 64, 8, 3)),
        *(TmaTile(128, 128, 64, 8, 2, 2), TmaTile(64, 64, 128, 4, 2, 3)),
    ),
    "v32 v_up": (
        *(TmaTile(64, 64, 128, 4, 5), TmaTile(64, 128, 64, 4, 7), TmaTile(64, 64, 128, 4, 2, 2)),
        *(TmaTile(64, 128, 128, 4, 3), TmaTile(128, 128, 64, 8, 6), TmaTile(128, 128, 128, 8, 3)),
        TmaTile(128, 128, 64, 8, 2, 2),
    ),
}
"""The same for programs that stay."""

_COMPILERS = 8
_CHECKED = (1, 17, 64, 65, 256, 1000)


def groups(setting: Setting) -> Iterator[Group]:
    """Every candidate at 64, 256 and 4,096 rows of each shape; the halves of K cancel.

    So another order of additions shows in the bits, which ordinary values hide after the rounding.
    """
    on_cuda = setting.device == "cuda"
    counts = ROWS if on_cuda else (5,)
    shapes = cases.SHAPES if on_cuda else {"v4 out_a": (2, 48, 64)}
    operands = {}
    for name, (groups, columns, inner) in shapes.items():
        x = torch.empty((max(counts), groups, inner), dtype=torch.bfloat16, device=setting.device)
        weight = x.new_empty((groups, columns, inner))
        fill_operands(x, weight)
        operands[name] = x, weight
    served = _compile(operands) if on_cuda else set()
    for name, (x, weight) in operands.items():
        for rows in counts:
            yield _group(name, x[:rows], weight, name in served)


def _group(name: str, x: torch.Tensor, weight: torch.Tensor, served: bool) -> Group:
    runs, chosen = variants(name, x, weight, served)
    rows, (groups, columns, inner) = x.shape[0], weight.shape
    return Group(
        op=cases.OP,
        shape=f"{name} M={rows} G={groups} N={columns} K={inner}",
        variants={label: functools.partial(run, slice(0, rows)) for label, run in runs.items()},
        chosen=chosen,
        stock={"bmm": functools.partial(cases.stock, x, weight)},
        rows=runs,
        counts=[count for count in _CHECKED if count < rows],
    )


def variants(
    name: str, x: torch.Tensor, weight: torch.Tensor, served: bool
) -> tuple[dict[str, Run], str]:
    """Return what is worth a try on rows of these operands, and the name of the committed one."""
    if not x.is_cuda:
        return {"reference": functools.partial(_public, x, weight, "reference")}, "reference"
    from consistent_kernels.grouped_linear.triton import tile_for

    tile = tile_for(x, weight)
    tiles = dict.fromkeys((tile, BASE_TILE, *TILES[name], *TMA_TILES[name]))
    runs = {str(tile): functools.partial(_tiled, x, weight, tile) for tile in tiles}
    if served:
        runs[DEEP_GEMM] = functools.partial(_public, x, weight, DEEP_GEMM)
    return runs, str(tile)


def _public(x: torch.Tensor, weight: torch.Tensor, impl: str, rows: slice) -> torch.Tensor:
    return grouped_linear(x[rows], weight, impl=impl)


def _tiled(x: torch.Tensor, weight: torch.Tensor, tile: TritonTile, rows: slice) -> torch.Tensor:
    from consistent_kernels.grouped_linear.triton import launch

    return launch(x[rows], weight, tile)


def _compile(operands: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> set[str]:
    """Compile every candidate, many at once; return the shapes whose rows DeepGEMM keeps."""
    from consistent_kernels.grouped_linear.deep_gemm_start import layer_shapes

    device = torch.device("cuda", torch.cuda.current_device())
    with ThreadPoolExecutor(_COMPILERS) as pool:
        pending: list[Future[Any]] = [
            pool.submit(_tiled, x, weight, tile, slice(0, 1))
            for name, (x, weight) in operands.items()
            for tile in dict.fromkeys((BASE_TILE, *TILES[name], *TMA_TILES[name]))
        ]
        served = set()
        wanted = {
            name: layer_shapes([tuple(weight.shape)], max(ROWS))
            for name, (_, weight) in operands.items()
        }
        try:
            prepare(set().union(*wanted.values()), device, 16)
            served = {name for name, shapes in wanted.items() if shapes}
        except ConsistencyError as error:  # no wheel, no nvcc, or rows that follow M
            typer.echo(f"grouped_linear: without {DEEP_GEMM}: {error}", err=True)
    for future in pending:
        future.exception()  # a tile that does not compile has its row's `error`
    return served
