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
import consistent_kernels.router.triton as router
from benchmarks.ops.case import Case, Setting
from benchmarks.ops.cases import compressor as compressor_cases
from benchmarks.ops.cases import fp8_experts as fp8_expert_cases
from benchmarks.ops.cases import indexer as indexer_cases
from benchmarks.ops.cases import router as router_cases
from benchmarks.schedules.group import Group
from consistent_kernels.errors import invalid

Values = Mapping[str, Any]

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


def experts(setting: Setting) -> Iterator[Group]:
    """What stands around the two grouped GEMMs of FP8 experts."""
    for case in fp8_expert_cases.cases(setting):
        if case.impl in ("deep_gemm", "reference") and case.shape.startswith(("M=64 ", "M=5 ")):
            for part, module, tried in (
                ("activation", fp8_expert_rows, ACTIVATIONS),
                ("sum", expert_rows, COMBINES),
            ):
                shape = f"{case.shape}, {part}"
                yield from groups_of(
                    dataclasses.replace(case, impl="triton", shape=shape), module, tried
                )
            return


def compressors(setting: Setting) -> Iterator[Group]:
    """State to FP8 cache, of the attention and of the indexer."""
    for name, size in (("csa", 512), ("index", 128)):
        for tokens in (5,) if setting.small else (1, 64, 256):
            for case, step in compressor_cases.steps(setting, name, 4, size, tokens):
                yield from groups_of(case, compressor, COMPRESSORS, lambda step=step: step.cache)


def routers(setting: Setting) -> Iterator[Group]:
    """DeepSeek's routers."""
    for case in router_cases.cases(setting):
        if "Qwen" not in case.shape:
            yield from groups_of(case, router, ROUTERS)


def indexers(setting: Setting) -> Iterator[Group]:
    """Index scores of few queries from pages."""
    shapes = ((5, 130),) if setting.small else ((1, 4096), (1, 32768), (1, 131072), (64, 4096))
    for rows, keys in shapes:
        for case in indexer_cases.decode(setting, rows, keys, 16 if setting.small else 64):
            yield from groups_of(case, indexer, INDEXERS)


def groups_of(
    case: Case, module: ModuleType, tried: list[Values], state: Callable[[], Any] = lambda: ()
) -> Iterator[Group]:
    """Yield the case under the module's constants and under others, if its program is Triton's."""
    if case.impl not in ("triton", "reference"):
        return
    committed = {name: _value(module, name) for name in tried[0]}
    every = [committed, *(values for values in tried if values != committed)]
    yield Group(
        op=case.op,
        shape=case.shape,
        variants={
            label(values): functools.partial(with_values, module, values, case.ours)
            for values in every
        },
        chosen=label(committed),
        stock={"stock": case.stock} if case.stock else {},
        state=state,
    )


def label(values: Values) -> str:
    """Return e.g. "NUM_WARPS=1"."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def _value(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise invalid("schedules", name, f"a constant of {module.__name__}", "absent")
    return getattr(module, name)


def with_values(module: ModuleType, values: Values, call: Callable[[], Any]) -> Any:
    """Call with other constants; they count when a kernel is launched, also into a graph."""
    before = {name: _value(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        return call()
    finally:
        for name, value in before.items():
            setattr(module, name, value)
