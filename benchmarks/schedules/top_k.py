"""Shapes of the top-k CUDA programs: how a row is shared, and among how many blocks at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.ops.case import Setting
from benchmarks.ops.cases.sparse_topk import stock_kernels
from benchmarks.schedules.group import Group
from consistent_kernels.sparse_topk import sparse_topk, sparse_topk_tickets
from consistent_kernels.sparse_topk.cuda import Shape, row_shape, sparse_topk_select

_K = 2048
_CHECKED_ROWS = 4
_COMPILERS = 14


def _short(vectors: int, threads: int, resident: int) -> Shape:
    return Shape(1, vectors, threads, resident, short=True)


_FEW_4K = [
    *(_short(2, 512, 1), _short(1, 1024, 1), _short(4, 256, 1)),
    *(Shape(1, 1, 1024), Shape(1, 2, 512), Shape(2, 1, 512)),
]
SHAPES = {
    (4096, 1): _FEW_4K,
    (4096, 64): _FEW_4K,
    (4096, 256): [
        *(_short(2, 512, 2), _short(1, 1024, 2), _short(4, 256, 2), _short(2, 512, 1)),
        *(Shape(1, 1, 1024), Shape(1, 1, 1024, 2), Shape(1, 2, 512, 2)),
    ],
    (131072, 1): [Shape(8, 4, 1024), Shape(8, 8, 512, 2), Shape(4, 8, 1024)],
    (131072, 64): [
        *(Shape(1, 0, 1024), Shape(2, 0, 1024), Shape(2, 0, 512, 2), Shape(8, 8, 512, 2)),
    ],
    (131072, 256): [
        *(Shape(1, 0, 1024), Shape(1, 0, 1024, 2), Shape(1, 0, 512, 2), Shape(2, 0, 512, 2)),
        *(Shape(8, 8, 512, 2), Shape(8, 4, 1024)),
    ],
    (8192, 1): [_short(4, 512, 1), _short(2, 1024, 1), Shape(1, 2, 1024), Shape(2, 1, 1024)],
    (8192, 64): [_short(4, 512, 1), _short(2, 1024, 1), Shape(1, 2, 1024)],
    (8192, 256): [_short(4, 512, 2), _short(2, 1024, 1), Shape(1, 2, 1024)],
    (32768, 1): [Shape(8, 1, 1024), Shape(4, 2, 1024), Shape(8, 2, 512, 2)],
    (32768, 64): [Shape(2, 4, 1024), Shape(2, 8, 512, 2), Shape(1, 8, 1024), Shape(1, 0, 1024, 2)],
    (32768, 256): [
        *(Shape(1, 8, 1024), Shape(1, 0, 512, 2), Shape(1, 0, 1024, 2), Shape(2, 8, 512, 2)),
    ],
}
"""Positions and rows to the shapes worth a try; the committed one is timed in any case."""


def name(shape: Shape | None) -> str:
    """Return e.g. "short vectors=2 threads=512 resident=2"; None is Triton's kernel."""
    if shape is None:
        return "triton"
    blocks = "short" if shape.short else f"select blocks={shape.blocks}"
    return f"{blocks} vectors={shape.vectors} threads={shape.threads} resident={shape.resident}"


def groups(setting: Setting) -> Iterator[Group]:
    """Each length and batch with normal scores; 4,096 also with half of the scores equal."""
    cells = {(130, 5): [Shape(1, 1, 512)]} if setting.small else SHAPES
    if setting.device == "cuda":
        _compile({shape for shapes in cells.values() for shape in shapes})
    for (columns, rows), shapes in cells.items():
        normal = setting.normal(rows, columns, seed=columns + rows, dtype=torch.float32)
        yield _group(normal, shapes, "normal")
        if columns == 4096:
            yield _group((normal - 0.6).relu(), shapes, "ties")


def _group(scores: torch.Tensor, shapes: list[Shape], kind: str) -> Group:
    rows, columns = scores.shape
    starts = torch.zeros(rows, dtype=torch.int32, device=scores.device)
    ends = torch.full_like(starts, columns)
    chosen = row_shape(rows, columns, _K)
    tickets = sparse_topk_tickets(rows, scores.device)

    def call(shape: Shape | None) -> Callable[[], Any]:
        # Without a shape the chosen one runs, which may be Triton's.
        return functools.partial(sparse_topk_select, scores, starts, ends, _K, tickets, shape)

    few = slice(0, _CHECKED_ROWS)
    expected = sparse_topk(
        scores[few].cpu(), starts[few].cpu(), ends[few].cpu(), _K, impl="reference"
    )
    return Group(
        op="sparse_topk",
        shape=f"rows={rows} positions={columns} k={_K} scores={kind}",
        variants={name(shape): call(shape) for shape in dict.fromkeys([chosen, *shapes])},
        chosen=name(chosen),
        stock=stock_kernels(scores, starts, ends, _K),
        expected=expected,
    )


def _compile(shapes: set[Shape]) -> None:
    """Run each once, in threads: NVRTC takes most of a second for one."""

    def run(shape: Shape) -> None:
        columns = 4 * shape.blocks * max(shape.vectors, 1) * shape.threads
        scores = torch.zeros(1, columns, device="cuda")
        starts = torch.zeros(1, dtype=torch.int32, device="cuda")
        sparse_topk_select(scores, starts, starts + columns, _K, None, shape)

    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(run, shapes))
