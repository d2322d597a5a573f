"""Start of DeepGEMM: compile its kernels in parallel, then show that no row's bits follow M.

DeepGEMM compiles one kernel per (N, K) and tile choice with nvcc when it first meets it, some four
seconds each, and keeps it on disk (DG_JIT_CACHE_DIR). Where the first kernels of a model are not
there yet, child processes compile all of them at once; each keeps its own CUDA context and ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from consistent_kernels.errors import MissingBinaryError, NumericsError

PIECES = (16384, 8192, 4096, 2048, 1024, 512)
"""Row counts of one call, largest first; what is left below the smallest is a call of its own.

The number of SMs that a launch fills is a constant of DeepGEMM's kernels, so nearly every large M
compiled its own, for seconds, in the middle of a run. Cut into these, few kernels serve all.
"""

LARGEST_ROWS = max(PIECES)
"""Rows of the largest call; nothing above it is compiled or probed."""

ROWS = tuple(sorted({1, 2, 8, 9, 17, 33, 65, 129, 257, *range(16, min(PIECES), 16), *PIECES}))
"""Row counts that are probed, up to a model's limit: every piece, and below the smallest one every
multiple of 16, at which DeepGEMM's tiles, and with them its kernels, change."""

_RUN = 8
"""Row counts below PIECES that one process compiles one after the other."""

_SOME_ROWS = 64
"""Rows of a usual decode step: grouped GEMMs have a layout of their own for them."""

COLD_SECONDS = 0.7
"""A first call that takes longer has compiled: a kernel from disk loads in a few milliseconds."""

_REMEDY = (
    "It compiles with nvcc at run time and keeps kernels on disk: check CUDA_HOME, the free device "
    "memory, and the folder DG_JIT_CACHE_DIR (by default deep_gemm in vLLM's cache, or "
    "~/.deep_gemm), which must be writable, have room, and hold no damaged file; it may be deleted"
)

_CHILD = (
    "import sys; sys.path[:] = {path!r}; "
    "from consistent_kernels.deep_gemm_start import _child; _child({job!r})"
)


class Shape(Protocol):
    """One layer shape: a frozen dataclass of JSON values, in a module that a child can import.

    `max_rows` is the largest M to probe: what will be asked for, at most LARGEST_ROWS.
    """

    max_rows: int

    def operands(
        self, rows: int, device: torch.device, *, blank: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Return what `run` multiplies, `rows` rows of it; anything where `blank`."""

    def run(self, operands: tuple[torch.Tensor, ...], rows: slice) -> torch.Tensor:
        """Return the library's result [rows, N] for these rows of the operands."""


_passed: set[tuple[Shape, torch.device]] = set()


def fill_operands(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Fill the operands of a probe with values whose products show the order of their additions.

    The second half of K cancels the first in exact arithmetic: what is left of a product is the
    error of its additions, so their order shows even after a rounding to bf16, which hides it in
    all but one of some 10,000 ordinary results.

    Args:
        x: [M, ..., K]; weight: [..., N, K]; bf16.
    """
    columns, inner = weight.shape[-2:]
    generator = torch.Generator(x.device).manual_seed(columns * 131 + inner)
    values = torch.randn(x.shape, device=x.device, generator=generator, dtype=torch.float32)
    # Magnitudes over several powers of two: additions of equal ones would often be exact.
    powers = torch.exp2(torch.arange(x.shape[0], device=x.device) % 7 - 3)
    values *= powers.view(-1, *[1] * (x.dim() - 1))
    x.copy_(values)
    weight.normal_(0, 0.05, generator=generator)
    half = inner // 2
    x[..., half : 2 * half] = x[..., :half].flip(-1)
    weight[..., half : 2 * half] = -weight[..., :half].flip(-1)


@functools.cache
def pieces(rows: int) -> tuple[int, ...]:
    """Return the row counts of the calls that serve `rows` rows, in order (see `PIECES`)."""
    found: list[int] = []
    for size in PIECES:
        found += [size] * (rows // size)
        rows %= size
    return (*found, rows) if rows else tuple(found)


@functools.cache
def parts(rows: int) -> tuple[slice, ...]:
    """Return the rows of each call of `pieces`."""
    bounds = itertools.accumulate(pieces(rows), initial=0)
    return tuple(slice(first, end) for first, end in itertools.pairwise(bounds))


def probed_rows(max_rows: int) -> list[int]:
    """Return the row counts to probe, ascending, `max_rows` included."""
    return sorted({rows for rows in ROWS if rows < max_rows} | {max_rows})


def prepare(shapes: Iterable[Shape], device: torch.device, processes: int = 12) -> float:
    """Compile every kernel that these shapes may need and check that rows keep their bits.

    Args:
        shapes: all served by DeepGEMM, of one class or several.
        device: a CUDA device.
        processes: compilers at once, at most; each takes some 600 MB of device memory meanwhile.

    Returns:
        Seconds it took.

    Raises:
        NumericsError: a row's bits follow the number of rows on this machine.
        MissingBinaryError: a kernel does not compile, or cannot be kept on disk or loaded from it.
    """
    start = time.monotonic()
    unique = sorted(set(shapes), key=repr)
    with _one_at_a_time():
        if any(_has_to_compile(shape, device) for shape in unique):
            _compile(unique, device, processes)
    for shape in unique:
        check_rows(shape, device)
    return time.monotonic() - start


def check_rows(shape: Shape, device: torch.device) -> None:
    """Compare rows of every probed M with those of the largest one, byte for byte.

    Raises:
        NumericsError: naming shape and M.
    """
    counts = probed_rows(shape.max_rows)
    operands = shape.operands(counts[-1], device)
    expected = shape.run(operands, slice(0, counts[-1]))
    for count in counts[:-1]:
        for first in {0, (counts[-1] - count) // 2}:
            part = slice(first, first + count)
            actual = shape.run(operands, part)
            if not torch.equal(actual.view(torch.uint8), expected[part].view(torch.uint8)):
                raise NumericsError(
                    f"DeepGEMM's rows for {shape} differ between M={count} and M={counts[-1]} on "
                    f"{_name(device)}. Use impl 'triton' here (VLLM_CONSISTENT_PROGRAM=triton) and "
                    "report it"
                )

    _passed.add((shape, device))


def has_passed(shape: Shape, device: torch.device) -> bool:
    """Whether `check_rows` has passed a shape like this one in this process, of any `max_rows`."""
    return any(
        device == of and dataclasses.replace(passed, max_rows=shape.max_rows) == shape
        for passed, of in _passed
        if type(passed) is type(shape)
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    # The ranks of a node start together: one compiles, the others then find its kernels on disk.
    # One file a user: where folders are shared, another's could not be opened.
    name = f"consistent_kernels.deep_gemm.{os.getuid()}.lock"
    with open(Path(tempfile.gettempdir()) / name, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _has_to_compile(shape: Shape, device: torch.device) -> bool:
    """Whether a call of few, some or most rows took as long as a compiler does; it then has."""
    for rows in sorted({1, min(_SOME_ROWS, shape.max_rows), shape.max_rows}):
        operands = shape.operands(rows, device, blank=True)
        torch.cuda.synchronize(device)
        start = time.monotonic()
        try:
            shape.run(operands, slice(0, rows))
            torch.cuda.synchronize(device)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            problem = f"the first call of {shape} with {rows} rows failed: {error}"
            raise MissingBinaryError("deep_gemm", problem, sys.executable, _REMEDY) from error
        if time.monotonic() - start > COLD_SECONDS:
            return True
    return False


def _compile(shapes: Sequence[Shape], device: torch.device, processes: int) -> None:
    """Run each shape's rows in child processes; their kernels land in DeepGEMM's disk cache."""
    jobs = _shared_out(shapes, max(1, min(processes, os.cpu_count() or 1)))
    running: list[tuple[subprocess.Popen[bytes], Any]] = []
    try:
        for job in jobs:
            running.append(_start(job, device))
        while running:
            time.sleep(0.05)
            for child in [child for child in running if child[0].poll() is not None]:
                running.remove(child)
                _check_child(*child)
    finally:  # one failed, or the start was interrupted: the others would compile on, unwatched
        for process, log in running:
            process.kill()
            process.wait()
            log.close()


def _shared_out(shapes: Sequence[Shape], processes: int) -> list[list[tuple[Shape, list[int]]]]:
    """Share the rows to compile among at most so many processes: [(shape, rows)] of each.

    A process costs seconds before it compiles anything, so none is started for one shape alone.
    Every size of PIECES has a kernel of its own; below them neighbouring M share one, and stay
    together, so that few compile twice.
    """
    runs: list[tuple[Shape, list[int]]] = []
    large: list[tuple[Shape, list[int]]] = []
    for shape in shapes:
        rows = probed_rows(shape.max_rows)
        small = [m for m in rows if m < min(PIECES)]
        runs += [(shape, small[first : first + _RUN]) for first in range(0, len(small), _RUN)]
        large += [(shape, [m]) for m in rows if m >= min(PIECES)]
    parts = runs + large
    return [job for job in (parts[index::processes] for index in range(processes)) if job]


def _start(
    job: Sequence[tuple[Shape, list[int]]], device: torch.device
) -> tuple[subprocess.Popen[bytes], Any]:
    index = device.index if device.index is not None else torch.cuda.current_device()
    parts = [
        {
            "class": [type(shape).__module__, type(shape).__qualname__],
            "fields": dataclasses.asdict(shape),
            "rows": rows,
        }
        for shape, rows in job
    ]
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the child has ended
    given = json.dumps({"device": index, "parts": parts})
    code = _CHILD.format(path=list(sys.path), job=given)
    return subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log), log


def _check_child(child: subprocess.Popen[bytes], log: Any) -> None:
    log.seek(0)
    output = log.read().decode(errors="replace")
    log.close()
    if child.returncode != 0:
        raise MissingBinaryError(
            "deep_gemm",
            f"compiling its kernels failed (exit {child.returncode}): {output[-2000:]}",
            sys.executable,
            _REMEDY,
        )


def _child(job: str) -> None:
    given = json.loads(job)
    device = torch.device("cuda", given["device"])
    torch.cuda.set_device(device)
    for part in given["parts"]:
        module, name = part["class"]
        shape: Shape = getattr(importlib.import_module(module), name)(**part["fields"])
        for rows in part["rows"]:
            shape.run(shape.operands(rows, device, blank=True), slice(0, rows))
    torch.cuda.synchronize(device)
