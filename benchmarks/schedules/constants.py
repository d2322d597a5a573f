"""Schedule constants of Triton kernels that move no bit, tried on the cases of `benchmarks/ops`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import consistent_kernels.compressor.spec as compressor
import consistent_kernels.experts.deep_gemm_rows as expert_rows
import consistent_kernels.fp8_experts.deep_gemm_rows as fp8_expert_rows
import consistent_kernels.indexer.triton as indexer
import consistent_kernels.kv_cache_fp8.triton as kv_cache
import consistent_kernels.router.triton as router
from benchmarks.ops.case import Case, Setting
from benchmarks.ops.cases import compressor as compressor_cases
from benchmarks.ops.cases import fp8_experts as fp8_expert_cases
from benchmarks.ops.cases import indexer as indexer_cases
from benchmarks.ops.cases import kv_cache_fp8 as kv_cases
from benchmarks.ops.cases import router as router_cases
from benchmarks.ops.cases import sparse_attention as sparse_cases
from benchmarks.schedules.group import Group
from consistent_kernels.errors import invalid
from consistent_kernels.kv_cache_fp8 import V4, V32

Values = Mapping[str, int]

GATHERS = [
    {"GATHER_WARPS": warps, "GATHER_VALUES": values}
    for warps, values in ((4, 8), (8, 8), (2, 8), (4, 16))
]
GATHERS_V4 = [
    {"GATHER_WARPS": warps, "GATHER_VALUES_V4": values}
    for warps, values in ((4, 16), (4, 8), (2, 16), (8, 16), (2, 32), (4, 32))
]
DECODES = [{"GATHER_DESCENDING": descending} for descending in (False, True)]
ACTIVATIONS = [
    {"ACTIVATION_GROUPS": groups, "ACTIVATION_WARPS": warps}
    for groups, warps in ((16, 4), (8, 8), (4, 4), (2, 2), (2, 1), (1, 1))
]
COMBINES = [
    {"COMBINE_BLOCK": block, "NUM_WARPS": warps}
    for block, warps in ((1024, 4), (512, 4), (512, 2), (256, 2), (256, 1))
]
COMPRESSORS = [{"COLUMNS_PER_WARP": columns} for columns in (64, 128, 256)]
ROUTERS = [{"NUM_WARPS": warps} for warps in (1, 2)]
INDEXERS = [{"MIN_PROGRAMS": programs} for programs in (0, 132, 264, 528)]


def gathers(setting: Setting) -> Iterator[Group]:
    """FP8 entries gathered to bf16."""
    shapes = ((V32, 5),) if setting.small else ((V4, 256), (V4, 64), (V32, 64), (V32, 256))
    for layout, queries in shapes:
        for case in kv_cases.reads(setting, layout, queries):
            yield from _groups(case, kv_cache, GATHERS_V4 if layout is V4 else GATHERS)


def decodes(setting: Setting) -> Iterator[Group]:
    """FP8 entries gathered, then read by the sparse forward: the order of one serves the other."""
    for case in sparse_cases.cases(setting):
        if case.op == "sparse_attention_fp8_decode" and case.impl != "triton":
            yield from _groups(dataclasses.replace(case, impl="triton"), kv_cache, DECODES)


def experts(setting: Setting) -> Iterator[Group]:
    """What stands around the two grouped GEMMs of FP8 experts."""
    for case in fp8_expert_cases.cases(setting):
        if case.impl in ("deep_gemm", "reference") and case.shape.startswith(("M=64 ", "M=5 ")):
            for part, module, tried in (
                ("activation", fp8_expert_rows, ACTIVATIONS),
                ("sum", expert_rows, COMBINES),
            ):
                shape = f"{case.shape}, {part}"
                yield from _groups(
                    dataclasses.replace(case, impl="triton", shape=shape), module, tried
                )
            return


def compressors(setting: Setting) -> Iterator[Group]:
    """State to FP8 cache, of the attention and of the indexer."""
    for name, size in (("csa", 512), ("index", 128)):
        for tokens in (5,) if setting.small else (1, 64, 256):
            for case, step in compressor_cases.steps(setting, name, 4, size, tokens):
                yield from _groups(case, compressor, COMPRESSORS, lambda step=step: step.cache)


def routers(setting: Setting) -> Iterator[Group]:
    """DeepSeek's routers."""
    for case in router_cases.cases(setting):
        if "Qwen" not in case.shape:
            yield from _groups(case, router, ROUTERS)


def indexers(setting: Setting) -> Iterator[Group]:
    """Index scores of few queries from pages."""
    shapes = ((5, 130),) if setting.small else ((1, 4096), (1, 32768), (1, 131072), (64, 4096))
    for rows, keys in shapes:
        for case in indexer_cases.decode(setting, rows, keys, 16 if setting.small else 64):
            yield from _groups(case, indexer, INDEXERS)


def _groups(
    case: Case, module: ModuleType, tried: list[Values], state: Callable[[], Any] = lambda: ()
) -> Iterator[Group]:
    if case.impl not in ("triton", "reference"):
        return
    committed = {name: _value(module, name) for name in tried[0]}
    every = [committed, *(values for values in tried if values != committed)]
    yield Group(
        op=case.op,
        shape=case.shape,
        variants={
            label(values): functools.partial(_with, module, values, case.ours) for values in every
        },
        chosen=label(committed),
        stock={"stock": case.stock} if case.stock else {},
        state=state,
    )


def label(values: Values) -> str:
    """Return e.g. "NUM_WARPS=1"."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def _value(module: ModuleType, name: str) -> int:
    if not hasattr(module, name):
        raise invalid("schedules", name, f"a constant of {module.__name__}", "absent")
    return getattr(module, name)


def _with(module: ModuleType, values: Values, call: Callable[[], Any]) -> Any:
    """Call with other constants; they count when a kernel is launched, also into a graph."""
    before = {name: _value(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        return call()
    finally:
        for name, value in before.items():
            setattr(module, name, value)
