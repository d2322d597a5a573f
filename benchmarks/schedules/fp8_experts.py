"""FP8 experts of few tokens over DeepGEMM: how places, tiles and launches are chosen."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import consistent_kernels.fp8_experts.deep_gemm_grouped as grouped
import consistent_kernels.fp8_experts.deep_gemm_packed as packed
from benchmarks.ops.case import Setting
from benchmarks.ops.cases.fp8_experts import stock_experts
from benchmarks.schedules.group import Group
from consistent_kernels.fp8_experts import fp8_experts, quantize_expert_weight
from consistent_kernels.fp8_experts.deep_gemm_start import Fp8GroupedGemmShape, layer_shapes

_SHAPE = (128, 8, 2048, 768)
_SMALL = (8, 2, 128, 128)
_TOKENS = (64, 256, 8, 128)
_COMPILERS = 12
_COMPILED = (16, 32)
"""Rows of a tile that some variant takes at few tokens."""
_FORMAT = "fp32"

Values = Mapping[str, Any]
_MODULES = (grouped, packed)
_CHOSEN = "packed, as committed"


def _narrow(*_: int) -> int:
    return grouped.NARROW_TILE


def _wide(*_: int) -> int:
    return grouped.WIDE_TILE


VARIANTS: dict[str, Values] = {
    _CHOSEN: {},
    "narrow tiles": {"tile_columns": _narrow},
    "wide tiles": {"tile_columns": _wide},
    "16 warps": {"NUM_WARPS": 16},
    "16 warps, 16 groups": {"NUM_WARPS": 16, "GROUPS_PER_PROGRAM": 16},
    "counted before": {"COUNTED_ROWS": 0},
    "counted before, 4 groups": {"COUNTED_ROWS": 0, "GROUPS_PER_PROGRAM": 4},
    "counted before, 8 warps": {"COUNTED_ROWS": 0, "SCATTER_WARPS": 8},
    "counted at once, 16 warps": {"COUNTED_ROWS": 1 << 11, "NUM_WARPS": 16},
}
"""Constants that differ from the committed ones."""


def groups(setting: Setting) -> Iterator[Group]:
    """The layer of Qwen3-30B-A3B, packed as each variant says, and stock's."""
    on_cuda = setting.device == "cuda"
    experts, top_k, hidden, width = _SMALL if setting.small else _SHAPE
    counts = _TOKENS if on_cuda else (5,)
    rows = max(counts)
    if on_cuda:
        _compile(layer_shapes(experts, hidden, width, 2 * packed.PACKED_ROWS, _FORMAT))
    x = setting.hazards(rows, hidden, seed=1)
    options = {"scale_format": _FORMAT, "impl": "deep_gemm" if on_cuda else "reference"}
    w13 = quantize_expert_weight(
        setting.normal(experts, 2 * width, hidden, seed=2, scale=0.02), **options
    )
    w2 = quantize_expert_weight(
        setting.normal(experts, hidden, width, seed=3, scale=0.02), **options
    )
    weights, ids = setting.normal(rows, experts, seed=4).float().softmax(-1).topk(top_k)
    ids = ids.int()
    for tokens in counts:
        given = (x[:tokens], w13, w2, ids[:tokens], weights[:tokens])
        run = functools.partial(fp8_experts, *given, **options)
        variants: dict[str, Callable[[], Any]] = {
            name: functools.partial(_with, values, functools.partial(run, layout="fastest"))
            for name, values in VARIANTS.items()
        }
        yield Group(
            op="fp8_experts",
            shape=f"M={tokens} E={experts} K={top_k} H={hidden} I={width} {_FORMAT}, layout",
            variants=variants,
            chosen=_CHOSEN,
            stock={"stock": stock_experts(*given)} if on_cuda else {},
        )


@contextlib.contextmanager
def _constants(values: Values) -> Iterator[None]:
    owners = {name: next(m for m in _MODULES if hasattr(m, name)) for name in values}
    before = {name: getattr(owner, name) for name, owner in owners.items()}
    try:
        for name, value in values.items():
            setattr(owners[name], name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owners[name], name, value)


def _with(values: Values, call: Callable[[], Any]) -> Any:
    """Call with other constants; they count when a kernel is launched, also into a graph."""
    with _constants(values):
        return call()


def _compile(shapes: tuple[Fp8GroupedGemmShape, ...]) -> None:
    """Compile what the variants need at once, each kernel in a process: each takes seconds."""
    jobs: list[tuple[Fp8GroupedGemmShape, Values, int]] = []
    for shape in shapes:
        jobs += [
            (shape, {"ALIGNMENTS": (rows,), "tile_columns": columns}, packed.PACKED_ROWS)
            for rows in _COMPILED
            for columns in (_narrow, _wide)
        ]
        jobs.append((shape, {}, 2 * packed.PACKED_ROWS))
    with multiprocessing.get_context("spawn").Pool(_COMPILERS) as pool:
        pool.starmap(_run_blank, jobs, chunksize=1)


def _run_blank(shape: Fp8GroupedGemmShape, values: Values, rows: int) -> None:
    device = torch.device("cuda", 0)
    with _constants(values):
        shape.run(shape.operands(rows, device, blank=True), slice(0, rows))
    torch.cuda.synchronize()
