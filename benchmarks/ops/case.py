"""What an op's file in `cases/` contributes."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from benchmarks.ops import cases as case_files
from consistent_kernels.errors import UnsupportedError, invalid
from consistent_kernels.testing import hazard_activations

_DISTINCT_ROWS = 257
_CPU_IMPLEMENTATIONS = ("reference", "onednn", "llvm")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where the cases will run.

    Attributes:
        device: "cuda" or "cpu".
        small: shapes that a CPU takes in seconds, to test a case file; no result comes from them.
    """

    device: str
    small: bool = False

    def implementations(self, names: Iterable[str]) -> list[str]:
        """Return those of an op's IMPLEMENTATIONS to run here: on a CPU the reference alone."""
        if self.device == "cpu":
            return [name for name in names if name == "reference"]
        return [name for name in names if name not in _CPU_IMPLEMENTATIONS]

    def rows(self) -> tuple[int, ...]:
        """Return the batch sizes that every op is measured at."""
        return (1, 5) if self.small else (1, 64, 256, 4096)

    def hazards(self, *shape: int, seed: int) -> torch.Tensor:
        """Return bf16 `hazard_activations`; from row 257 on rows repeat (drawing takes long)."""
        distinct = min(shape[0], _DISTINCT_ROWS)
        x = hazard_activations((distinct, *shape[1:]), seed=seed, device=self.device)
        repeats = -(-shape[0] // distinct)
        return x.repeat(repeats, *(1 for _ in shape[1:]))[: shape[0]]

    def normal(
        self,
        *shape: int,
        seed: int,
        scale: float = 1.0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """Return scaled normal values, drawn on the device (a large weight takes no time there)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.empty(shape, dtype=dtype, device=self.device)
        return values.normal_(0.0, scale, generator=generator)


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        op: as its folder in `kernels/consistent_kernels`, or a public function of it.
        shape: for the table, e.g. "M=64 N=4096 K=4096"; (op, shape, impl) names a row.
        impl: implementation of ours.
        ours: runs the op once, on tensors that it holds; its result is dropped. Captured into a
            CUDA graph unless `graph` is False, so it must not synchronize with the host.
        stock: the same work by the kernel that stock vLLM (or stock Hugging Face) runs, or None.
        relations: raises AssertionError where a bitwise relation of `ours` fails; see
            `benchmarks/ops/relations.py`. Give one callable to many cases and it runs once.
        reason: why there is no stock kernel, or why ours is slower. Required where stock is None.
        graph: False where a call cannot be captured.
    """

    op: str
    shape: str
    impl: str
    ours: Callable[[], Any]
    stock: Callable[[], Any] | None
    relations: Callable[[], None]
    reason: str | None = None
    graph: bool = True

    def __post_init__(self) -> None:
        if self.stock is None and not self.reason:
            raise invalid("Case", "reason", "given where stock is None", self.reason)


def case_modules(only: Iterable[str] = ()) -> list[ModuleType]:
    """Return the modules of `benchmarks/ops/cases`, or those of the named ops.

    Raises:
        UnsupportedError: an op without a case file.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(case_files.__path__))
    wanted = tuple(only) or tuple(names)
    for name in wanted:
        if name not in names:
            raise UnsupportedError("benchmarks.ops", f"op {name!r}", names)
    return [importlib.import_module(f"{case_files.__name__}.{name}") for name in wanted]


def cases_of(module: ModuleType, setting: Setting) -> Iterator[Case]:
    """Yield the module's cases; build tensors between them, so that one case's memory is freed."""
    yield from module.cases(setting)
