"""The CUDA sources of the sparse top-k as CPU libraries whose threads are fibers."""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources
from pathlib import Path

import torch

PACKAGE = "consistent_kernels.sparse_topk"
SUPPORT = Path(__file__).parent


def build_for_cpu(name: str, folder: Path, threads: int, *change: str) -> ctypes.CDLL:
    """Compile `name`.cu ("select" or "short") as a CPU library.

    Args:
        name: of the source; `<name>_on_cpu.cpp` replaces its GPU instructions.
        folder: takes what is built.
        threads: of a block.
        change: a text of the source and what takes its place.
    """
    source = (resources.files(PACKAGE) / f"{name}.cu").read_text()
    if change:
        assert change[0] in source
        source = source.replace(*change)
    before, rest = source.split("// <device>")
    body = rest.split("// </device>")[1].split("// <kernel>")[0]
    header = folder / f"{name}.h"
    header.write_text(before + body)
    command = [
        "g++", "-O1", "-std=c++17", "-shared", "-fPIC", f"-I{SUPPORT}",
        f"-DBLOCK_THREADS={threads}", f'-DSOURCE="{header}"',
        str(SUPPORT / f"{name}_on_cpu.cpp"), "-o", str(folder / f"{name}.so"),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(folder / f"{name}.so"))


def run_on_cpu(
    library: ctypes.CDLL,
    shape: tuple[int, int],
    scores: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """Return what the library selects; shape: blocks of a row, vectors of a thread."""
    rows, columns = scores.shape
    buffer = torch.full((rows, -(-columns // 16) * 16), float("inf"))
    buffer[:, :columns] = scores
    got = torch.full((rows, k), -7, dtype=torch.int32)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (buffer, starts, ends, got))
    done = library.select_on_cpu(
        *shape, *pointers, rows, ctypes.c_longlong(buffer.stride(0)), columns, k,
        int(starts.dtype == torch.int64),
    )  # fmt: skip
    assert done == 1
    return got
