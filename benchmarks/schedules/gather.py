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
from consistent_kernels.kv_cache_fp8 import V4, gather_kv_fp8
from consistent_kernels.kv_cache_fp8.cuda import Shape, gather_v4_fwd

GATHERS = [
    {"GATHER_WARPS": warps, "GATHER_VALUES_V4": values} for warps, values in ((4, 16), (2, 16))
]
DECODES = [{"GATHER_DESCENDING": descending} for descending in (True, False)]
SHAPES = [
    *(Shape(), Shape(batch=2), Shape(batch=1), Shape(warps=2), Shape(warps=1), Shape(warps=8)),
    *(Shape(warps=8, batch=2), Shape(warps=16, batch=2)),
    *(Shape(shared=24 << 10), Shape(shared=44 << 10)),
]
"""Of `gather.cu`, tried alone and before the attention."""

PIECES = {
    "v4": ((256,), (132, 124), (128, 128), (88, 84, 84), (64, 64, 64, 64)),
    "v32": ((256,), (132, 124), (66, 66, 66, 58)),
}
"""Queries that are gathered, then attended to, before the next ones, by layout, of 256: a wave or
a part of it."""


def gathers(setting: Setting) -> Iterator[Group]:
    """V4's entries gathered to bf16."""
    for queries in (5,) if setting.small else (256, 64):
        for case in kv_cases.reads(setting, V4, queries):
            for group in groups_of(case, kv_cache, GATHERS):
                yield _with_shapes(group, case.ours, SHAPES if setting.device == "cuda" else [])


def decodes(setting: Setting) -> Iterator[Group]:
    """Entries gathered, then read by the sparse forward."""
    v32, v4 = sparse_cases._FORMS
    for form, queries in ((v4, 256), (v4, 64), (v32, 256)):
        if setting.small:
            form, queries = dataclasses.replace(form, heads=4, columns=64), 5
        for case in sparse_cases._decode(setting, form, queries):
            if case.op == "sparse_attention_fp8_decode" and case.impl != "triton":
                case = dataclasses.replace(case, impl="triton")
                for group in groups_of(case, kv_cache, DECODES):
                    yield _more(group, case, queries) if setting.device == "cuda" else group


def _more(group: Group, case: Case, queries: int) -> Group:
    name = case.shape.split()[0]
    if name == "v4":
        group = _with_shapes(group, case.ours, SHAPES)
    if queries != 256:
        return group
    more = {}
    for sizes in PIECES[name]:
        for shape in (None, Shape(), Shape(batch=2)) if name == "v4" else (None,):
            for apart in (False, True) if sizes == (132, 124) else (False,):
                by = "triton" if shape is None else shape_name(shape)
                label = f"pieces of {sizes}{' apart' if apart else ''}: {by}"
                more[label] = functools.partial(_in_pieces, case.ours.args, sizes, shape, apart)
    return dataclasses.replace(group, variants={**group.variants, **more})


def shape_name(shape: Shape) -> str:
    """Return e.g. "cuda warps=4 batch=4 rounds=1 order=1 read=0 kept=0 grid=0 shared=0"."""
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


def _in_pieces(
    arguments: tuple[Any, ...], sizes: tuple[int, ...], shape: Shape | None, apart: bool
) -> torch.Tensor:
    """Gather a piece of the queries and attend to it before the next.

    Args:
        arguments: of the case's call.
        shape: of the gather in CUDA C++; None is Triton's.
        apart: whether pieces have rows of their own, instead of the same ones.
    """
    from consistent_kernels.sparse_attention.flash_mla import _kernel

    q, cache, positions, batch, sinks, workspace, *_ = arguments
    requests, table, layout = batch.requests, batch.block_table, workspace.bounds.layout
    op, count = _kernel()
    queries, k = positions.shape
    rows = torch.empty(
        (queries if apart else max(sizes), k, layout.width), dtype=torch.bfloat16, device=q.device
    )
    indices = torch.empty_like(positions)
    out = q.new_empty((*q.shape[:2], 512))
    begin = 0
    for size in sizes:
        part = slice(begin, begin + size)
        begin += size
        piece = rows[part] if apart else rows[:size]
        if shape is None:
            gather_kv_fp8(
                cache, positions[part], requests[part], layout=layout, impl="triton",
                block_table=table, out=piece, indices=indices[part],
            )  # fmt: skip
        else:
            places = (cache, positions[part], requests[part], table, None)
            gather_v4_fwd(*places, piece, indices[part], 0, shape)
        given = (q[part], piece.view(-1, 1, layout.width), indices[part].unsqueeze(1))
        scale = q.shape[2] ** -0.5
        op(*(*given, scale, 512, sinks, None, out[part])[:count])
    return out
