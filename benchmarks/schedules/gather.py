"""Ways to gather FP8 entries, alone and before the sparse forward; none moves a bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import consistent_kernels.kv_cache_fp8.triton as kv_cache
from benchmarks.ops.case import Case, Setting
from benchmarks.ops.cases import kv_cache_fp8 as kv_cases
from benchmarks.ops.cases import sparse_attention as sparse_cases
from benchmarks.schedules.constants import groups_of, with_values
from benchmarks.schedules.group import Group
from consistent_kernels.kv_cache_fp8 import V4
from consistent_kernels.kv_cache_fp8.cuda import Shape, gather_v4_fwd

GATHERS = [
    {"GATHER_WARPS": warps, "GATHER_VALUES_V4": values} for warps, values in ((4, 16), (2, 16))
]
DECODES = [{"GATHER_DESCENDING": descending} for descending in (False, True)]
SHAPES = [
    *(Shape(), Shape(batch=8), Shape(rounds=2), Shape(rounds=4), Shape(batch=8, rounds=4)),
    *(Shape(warps=8, rounds=2), Shape(read=0), Shape(read=2), Shape(rounds=2, read=2)),
    *(Shape(rounds=4, grid=528), Shape(warps=32, rounds=2, grid=132)),
]
"""Of `gather.cu`, tried alone and before the attention."""

ORDERS = [
    *(Shape(order=0), Shape(rounds=2, order=2), Shape(rounds=2, read=2, order=2)),
    *(Shape(kept=16), Shape(kept=32), Shape(rounds=2, read=2, order=2, kept=32)),
    Shape(rounds=2, order=2, kept=16),
]
"""Of `gather.cu`, which serve the attention's reads alone."""

_BESIDE = Shape(warps=32, rounds=2, grid=68)
"""Blocks that fill a multiprocessor each, so that attention has the others."""

PIECES = [
    ((64, 64, 64, 64), Shape(), _BESIDE),
    ((88, 88, 80), Shape(), _BESIDE._replace(grid=44)),
    ((40, 72, 72, 72), Shape(), _BESIDE._replace(grid=60)),
    ((64, 64, 64, 64), Shape(), Shape()),
]
"""Queries at a time; how the first are gathered, and the others, beside the attention."""


def gathers(setting: Setting) -> Iterator[Group]:
    """V4's entries gathered to bf16."""
    for queries in (5,) if setting.small else (256, 64):
        for case in kv_cases.reads(setting, V4, queries):
            for group in groups_of(case, kv_cache, GATHERS):
                yield _with_shapes(group, case.ours, SHAPES if setting.device == "cuda" else [])


def decodes(setting: Setting) -> Iterator[Group]:
    """V4's gathered, then read by the sparse forward: the order of one serves the other."""
    form = sparse_cases._FORMS[1]
    if setting.small:
        form = dataclasses.replace(form, heads=4, columns=64)
    for queries in (5,) if setting.small else (256, 64):
        for case in sparse_cases._decode(setting, form, queries):
            if case.op != "sparse_attention_fp8_decode" or case.impl == "triton":
                continue
            for group in groups_of(dataclasses.replace(case, impl="triton"), kv_cache, DECODES):
                if setting.device == "cuda":
                    group = _with_shapes(group, case.ours, [*SHAPES, *ORDERS])
                    group = _with_pieces(group, case) if queries == 256 else group
                yield group


def shape_name(shape: Shape) -> str:
    """Return e.g. "cuda warps=4 batch=4 rounds=1 order=1 read=1 kept=0 grid=0 shared=0"."""
    return "cuda " + " ".join(f"{name}={value}" for name, value in shape._asdict().items())


def _with_shapes(group: Group, call: Callable[[], Any], shapes: list[Shape]) -> Group:
    more = {
        shape_name(shape): functools.partial(
            with_values, kv_cache, {"gather_kv_fp8_fwd": functools.partial(_by_cuda, shape)}, call
        )
        for shape in shapes
    }
    return dataclasses.replace(group, variants={**group.variants, **more})


def _by_cuda(shape: Shape, *arguments: Any) -> None:
    *places, _layout = arguments
    gather_v4_fwd(*places, shape)


def _with_pieces(group: Group, case: Case) -> Group:
    more = {
        f"pieces of {sizes}: {shape_name(first)}; {shape_name(later)}": functools.partial(
            _in_pieces, case.ours.args, sizes, first, later
        )
        for sizes, first, later in PIECES
    }
    return dataclasses.replace(group, variants={**group.variants, **more})


@functools.cache
def _streams() -> tuple[torch.cuda.Stream, ...]:
    return torch.cuda.Stream(), *(torch.cuda.Stream(priority=-1) for _ in range(2))


def _in_pieces(
    arguments: tuple[Any, ...], sizes: tuple[int, ...], first: Shape, later: Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather a piece of the queries while the attention reads those before it."""
    from consistent_kernels.sparse_attention.flash_mla import _kernel

    q, cache, positions, requests, table, sinks, *_ = arguments
    op, count = _kernel()
    queries, k = positions.shape
    workspace = torch.empty((queries, k, V4.width), dtype=torch.bfloat16, device=q.device)
    indices = torch.empty_like(positions)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    rows = workspace.view(-1, 1, V4.width)
    main = torch.cuda.current_stream()
    gather, *readers = _streams()
    for stream in (gather, *readers):
        stream.wait_stream(main)
    begin, kept = 0, []
    for number, size in enumerate(sizes):
        part = slice(begin, begin + size)
        with torch.cuda.stream(gather):
            gather_v4_fwd(
                cache, positions[part], requests[part], table, None, workspace[part],
                indices[part], begin * k, later if number else first,
            )  # fmt: skip
        reader = readers[number % len(readers)]
        reader.wait_stream(gather)
        with torch.cuda.stream(reader):
            given = (q[part], rows, indices[part].unsqueeze(1), q.shape[2] ** -0.5, 512, sinks)
            kept.append(op(*(*given, None, out[part])[:count]))
            lse[part].copy_(kept[-1][2])
        begin += size
    for stream in (gather, *readers):
        main.wait_stream(stream)
    return out, lse
