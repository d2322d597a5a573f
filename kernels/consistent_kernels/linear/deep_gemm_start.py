"""Start of DeepGEMM: compile its kernels in parallel, then show that no row's bits follow M.

DeepGEMM compiles one kernel per (N, K) and tile choice with nvcc when it first meets it, some four
seconds each, and keeps it on disk (DG_JIT_CACHE_DIR). Where the first kernels of a model are not
there yet, child processes compile all of them at once; each keeps its own CUDA context and ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from consistent_kernels.errors import MissingBinaryError, NumericsError
from consistent_kernels.linear.deep_gemm import gemm, is_served

LARGEST_ROWS = 16384
"""Rows beyond which DeepGEMM's choice of tiles no longer changes; nothing above it is probed."""

ROWS = (
    *(1, 2, 8, 9, 16, 17, 24, 32, 33, 40, 48, 56, 64, 65, 80, 96, 112, 128, 129, 144, 160, 192),
    *(224, 256, 257, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384),
)
"""Row counts on both sides of DeepGEMM's tile choices; those up to a model's limit are probed."""

COLD_SECONDS = 0.7
"""A first call that takes longer has compiled: a kernel from disk loads in a few milliseconds."""

_CHILD = (
    "import sys; sys.path[:] = {path!r}; "
    "from consistent_kernels.linear.deep_gemm_start import _child; _child({job!r})"
)


@dataclasses.dataclass(frozen=True, order=True)
class GemmShape:
    """One layer shape that DeepGEMM serves.

    Attributes:
        columns, inner: N, K.
        max_rows: the largest M to probe: what will be asked for, at most LARGEST_ROWS.
        out_fp32: whether the result is fp32 (lm_head) or bf16.
    """

    columns: int
    inner: int
    max_rows: int
    out_fp32: bool = False

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return torch.float32 if self.out_fp32 else torch.bfloat16

    def rows(self) -> list[int]:
        """Return the row counts to probe, ascending, `max_rows` included."""
        return sorted({rows for rows in ROWS if rows < self.max_rows} | {self.max_rows})


def prepare(shapes: Iterable[GemmShape], device: torch.device, processes: int = 12) -> float:
    """Compile every kernel that these shapes may need and check that rows keep their bits.

    Args:
        shapes: layer shapes; those that the Triton kernel serves are skipped.
        device: a CUDA device.
        processes: compilers at once, at most; each takes some 600 MB of device memory meanwhile.

    Returns:
        Seconds it took.

    Raises:
        NumericsError: a row's bits follow the number of rows on this machine.
        MissingBinaryError: a kernel does not compile.
    """
    start = time.monotonic()
    served = sorted({s for s in shapes if is_served(s.columns, s.inner, False, s.out_dtype)})
    with _one_at_a_time():
        for shape in served:
            if _first_call_seconds(shape, device) > COLD_SECONDS:
                _compile(served, device, processes)
                break
    for shape in served:
        check_rows(shape, device)
    return time.monotonic() - start


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    # The ranks of a node start together: one compiles, the others then find its kernels on disk.
    with open(Path(tempfile.gettempdir()) / "consistent_kernels.deep_gemm.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_rows(shape: GemmShape, device: torch.device) -> None:
    """Compare rows of every probed M with those of the largest one, byte for byte.

    Raises:
        NumericsError: naming shape and M.
    """
    rows = shape.rows()
    x, weight = _inputs(shape, rows[-1], device)
    expected = _run(x, weight, shape.out_dtype)
    for count in rows[:-1]:
        for first in {0, (rows[-1] - count) // 2}:
            actual = _run(x[first : first + count], weight, shape.out_dtype)
            if not torch.equal(actual, expected[first : first + count]):
                raise NumericsError(
                    f"linear: DeepGEMM's rows for N={shape.columns}, K={shape.inner} differ "
                    f"between M={count} and M={rows[-1]} on {torch.cuda.get_device_name(device)}. "
                    "Use the Triton program here (VLLM_CONSISTENT_PROGRAM=triton) and report it"
                )


def _first_call_seconds(shape: GemmShape, device: torch.device) -> float:
    x, weight = _inputs(shape, 1, device)
    torch.cuda.synchronize(device)
    start = time.monotonic()
    _run(x, weight, shape.out_dtype)
    torch.cuda.synchronize(device)
    return time.monotonic() - start


def _inputs(shape: GemmShape, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # Magnitudes over several powers of two: additions of equal ones would often be exact.
    generator = torch.Generator(device).manual_seed(shape.columns * 131 + shape.inner)
    x = torch.randn((rows, shape.inner), device=device, generator=generator)
    x *= torch.exp2(torch.arange(rows, device=device)[:, None] % 7 - 3)
    weight = torch.empty((shape.columns, shape.inner), device=device, dtype=torch.bfloat16)
    weight.normal_(0, 0.05, generator=generator)
    return x.bfloat16(), weight


def _run(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    gemm(x, weight, y)
    return y


def _compile(shapes: Sequence[GemmShape], device: torch.device, processes: int) -> None:
    """Run each shape's rows in child processes; their kernels land in DeepGEMM's disk cache."""
    processes = max(1, min(processes, os.cpu_count() or 1))
    pieces = max(1, processes // len(shapes))
    jobs = []
    for shape in shapes:
        rows = shape.rows()
        # Neighbouring M share kernels: a child takes a run of them, so that few compile twice.
        size = -(-len(rows) // pieces)
        for start in range(0, len(rows), size):
            jobs.append((dataclasses.asdict(shape), rows[start : start + size]))
    jobs.sort(key=lambda job: -len(job[1]))
    running: list[tuple[subprocess.Popen[bytes], object]] = []
    while jobs or running:
        while jobs and len(running) < processes:
            running.append(_start(jobs.pop(0), device))
        time.sleep(0.05)
        for child in [child for child in running if child[0].poll() is not None]:
            running.remove(child)
            _check_child(*child)


def _start(job: tuple[dict, list[int]], device: torch.device) -> tuple[subprocess.Popen, object]:
    index = device.index if device.index is not None else torch.cuda.current_device()
    text = json.dumps({"shape": job[0], "rows": job[1], "device": index})
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the child has ended
    code = _CHILD.format(path=list(sys.path), job=text)
    return subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log), log


def _check_child(child: subprocess.Popen, log: object) -> None:
    log.seek(0)
    output = log.read().decode(errors="replace")
    log.close()
    if child.returncode != 0:
        raise MissingBinaryError(
            "deep_gemm",
            f"compiling its kernels failed (exit {child.returncode}): {output[-2000:]}",
            sys.executable,
            "It compiles with nvcc at run time: check CUDA_HOME and the free device memory",
        )


def _child(job: str) -> None:
    given = json.loads(job)
    device = torch.device("cuda", given["device"])
    shape = GemmShape(**given["shape"])
    torch.cuda.set_device(device)
    weight = torch.empty((shape.columns, shape.inner), device=device, dtype=torch.bfloat16)
    for rows in given["rows"]:
        _run(weight.new_empty((rows, shape.inner)), weight, shape.out_dtype)
    torch.cuda.synchronize(device)
