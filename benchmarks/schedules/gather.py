"""Ways to gather V4's FP8 entries, alone and before the sparse forward; none moves a bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import consistent_kernels.kv_cache_fp8.cuda as gather
from benchmarks.ops.case import Case, Setting
from benchmarks.ops.cases import kv_cache_fp8 as kv_cases
from benchmarks.ops.cases import sparse_attention as sparse_cases
from benchmarks.schedules.constants import groups_of, with_values
from benchmarks.schedules.group import Group
from consistent_kernels.kv_cache_fp8 import V4
from consistent_kernels.kv_cache_fp8.cuda import Shape
from consistent_kernels.kv_cache_fp8.triton import gather_kv_fp8_fwd

SHAPES = [Shape(), Shape(warps=1), Shape(warps=2), Shape(batch=2), Shape(read=2)]
"""Tried alone and before the attention."""

KEPT = [
    *(Shape(kept=size) for size in (8, 16, 24, 32, 40)),
    *(Shape(read=2, kept=size) for size in (16, 24, 32)),
    *(Shape(order=0), Shape(order=2), Shape(order=2, kept=24)),
]
"""What serves the attention's reads alone."""


def gathers(setting: Setting) -> Iterator[Group]:
    """V4's entries gathered to bf16."""
    for queries in (5,) if setting.small else (256, 64):
        for case in kv_cases.reads(setting, V4, queries):
            if case.impl != "triton":
                yield from _groups(case, SHAPES)


def decodes(setting: Setting) -> Iterator[Group]:
    """V4's gathered, then read by the sparse forward: the order of one serves the other."""
    form = sparse_cases._FORMS[1]
    if setting.small:
        form = dataclasses.replace(form, heads=4, columns=64)
    for queries in (5,) if setting.small else (256, 64):
        for case in sparse_cases._decode(setting, form, queries):
            if case.op == "sparse_attention_fp8_decode" and case.impl != "triton":
                yield from _groups(case, [*SHAPES, *KEPT])


def _groups(case: Case, shapes: list[Shape]) -> Iterator[Group]:
    impl = "triton" if case.impl != "reference" else case.impl  # `groups_of` takes these alone
    tried = [{"SHAPE": shape} for shape in shapes]
    for group in groups_of(dataclasses.replace(case, impl=impl), gather, tried):
        by_triton = functools.partial(with_values, gather, {"gather_v4_fwd": _by_triton}, case.ours)
        yield dataclasses.replace(group, variants={**group.variants, "triton": by_triton})


def _by_triton(*places: Any) -> None:
    gather_kv_fp8_fwd(*places, V4)
