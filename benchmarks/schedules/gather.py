"""Ways to gather FP8 entries, alone and before the sparse forward; none moves a bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import consistent_kernels.kv_cache_fp8.triton as kv_cache
from benchmarks.ops.case import Setting
from benchmarks.ops.cases import kv_cache_fp8 as kv_cases
from benchmarks.ops.cases import sparse_attention as sparse_cases
from benchmarks.schedules.constants import groups_of, with_values
from benchmarks.schedules.group import Group
from consistent_kernels.kv_cache_fp8 import V4
from consistent_kernels.kv_cache_fp8.cuda import Shape, gather_v4_fwd

GATHERS = [
    {"GATHER_WARPS": warps, "GATHER_VALUES_V4": values} for warps, values in ((4, 16), (2, 16))
]
DECODES = [{"GATHER_DESCENDING": descending} for descending in (True, False)]
SHAPES = [Shape(), Shape(warps=1), Shape(warps=2), Shape(batch=2), Shape(read=2)]
"""Of `gather.cu`, tried alone and before the attention."""

KEPT = [
    *(Shape(kept=size) for size in (8, 16, 24, 32, 40)),
    *(Shape(read=2, kept=size) for size in (16, 24, 32)),
    Shape(descending=False),
]
"""Of `gather.cu`, which serve the attention's reads alone."""


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
            if case.op == "sparse_attention_fp8_decode" and case.impl != "triton":
                tried = [*SHAPES, *KEPT] if setting.device == "cuda" else []
                for group in groups_of(dataclasses.replace(case, impl="triton"), kv_cache, DECODES):
                    yield _with_shapes(group, case.ours, tried)


def shape_name(shape: Shape) -> str:
    """Return e.g. "cuda warps=4 batch=4 descending=True read=0 kept=0"."""
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
