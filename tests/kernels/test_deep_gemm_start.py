"""How the start shares out what is to be compiled; what it finds is tested beside each op."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from consistent_kernels import deep_gemm_start as start
from consistent_kernels.deep_gemm_start import PIECES, check_rows, has_passed, probed_rows
from consistent_kernels.errors import MissingBinaryError, NumericsError
from consistent_kernels.experts import deep_gemm_start as grouped_start
from consistent_kernels.linear import deep_gemm_start as linear_start
from consistent_kernels.linear.deep_gemm_start import GemmShape

SHAPES = [GemmShape(64 * index, 128, rows) for index, rows in enumerate((16384, 16384, 300, 1), 1)]


@pytest.mark.parametrize("processes", [1, 3, 12, 1000])
def test_every_row_count_is_compiled_by_one_process(processes: int) -> None:
    jobs = start._shared_out(SHAPES, processes)
    assert 0 < len(jobs) <= processes
    given = [(shape, rows) for job in jobs for shape, many in job for rows in many]
    wanted = [(shape, rows) for shape in SHAPES for rows in probed_rows(shape.max_rows)]
    assert sorted(given) == sorted(wanted)


@pytest.mark.parametrize("rows", [0, 1, 511, 512, 513, 1536, 2047, 16384, 40000])
def test_parts_are_the_rows_of_each_call(rows: int) -> None:
    every = list(range(rows))
    parts = [every[part] for part in start.parts(rows)]
    assert [row for part in parts for row in part] == every
    assert tuple(map(len, parts)) == start.pieces(rows)


def test_calls_with_kernels_of_their_own_are_compiled_side_by_side() -> None:
    jobs = start._shared_out(SHAPES[:2], 12)
    own = [sum(rows[0] in PIECES for _, rows in job) for job in jobs]
    assert sum(own) == 2 * len(PIECES)
    assert max(own) - min(own) <= 1


@pytest.mark.parametrize("slow", [1, 64, 300, None])
def test_start_compiles_when_any_size_of_call_is_slow(
    slow: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(start.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(GemmShape, "operands", lambda self, rows, device, *, blank: (rows,))

    def run(self: GemmShape, operands: tuple[int], rows: slice) -> None:
        now[0] += 4.0 if operands == (slow,) else 0.01

    monkeypatch.setattr(GemmShape, "run", run)
    assert start._has_to_compile(SHAPES[2], torch.device("cuda", 0)) is (slow is not None)


@pytest.mark.parametrize("told", ["filesystem error: Read-only file system", "invalid image"])
def test_a_first_call_that_fails_names_the_folder(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepGEMM writes and loads its kernels in the call, and raises what it met there."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def run(self: GemmShape, operands: Any, rows: slice) -> None:
        raise RuntimeError(told)

    monkeypatch.setattr(GemmShape, "run", run)
    with pytest.raises(MissingBinaryError, match=f"{told}.*DG_JIT_CACHE_DIR"):
        start.prepare([SHAPES[3]], CPU)

    def no_room(self: GemmShape, operands: Any, rows: slice) -> None:
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(GemmShape, "run", no_room)
    with pytest.raises(torch.cuda.OutOfMemoryError):  # control: it keeps its own name
        start.prepare([SHAPES[3]], CPU)


def test_no_compiler_outlives_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def child(job: Any, device: torch.device) -> tuple[subprocess.Popen[bytes], Any]:
        code = "import time; time.sleep(60)" if children else "raise SystemExit(3)"
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the start
        children.append(subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log))
        return children[-1], log

    monkeypatch.setattr(start, "_start", child)
    monkeypatch.setattr(start.os, "cpu_count", lambda: 3)
    try:
        with pytest.raises(MissingBinaryError, match="exit 3"):
            start._compile(SHAPES, CPU, 3)
        assert len(children) > 1
        assert all(one.returncode is not None for one in children)
    finally:
        for one in children:
            one.kill()
            one.wait()


def test_a_child_runs_the_rows_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        GemmShape, "operands", lambda self, rows, device, *, blank: (rows, device, blank)
    )
    monkeypatch.setattr(
        GemmShape, "run", lambda self, operands, rows: ran.append((self, operands, rows))
    )
    monkeypatch.setattr(start.subprocess, "Popen", lambda command, **_: command)
    job = [(SHAPES[0], [512]), (SHAPES[2], [1, 2])]
    command, log = start._start(job, torch.device("cuda", 1))
    log.close()
    code = command[-1]
    text = code[code.index("_child(") + len("_child(") : -1]
    start._child(ast.literal_eval(text))
    device = torch.device("cuda", 1)
    assert ran == [
        (shape, (rows, device, True), slice(0, rows)) for shape, many in job for rows in many
    ]


CPU = torch.device("cpu")
SMALL = 40
"""Rows of the largest call that is probed below, where no library runs."""


def in_order(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """x W^T, fp32: products added one after the other in each of `parts` cuts of K, then the cuts.

    A CPU GEMM does not promise one order for all row counts, and `torch.cumsum` adds in fp64.
    """
    x, weight = x.float(), weight.float()
    total = torch.zeros((x.shape[0], weight.shape[0]))
    for columns in torch.arange(x.shape[1]).chunk(parts):
        part = torch.zeros_like(total)
        for k in columns.tolist():
            part += x[:, k, None] * weight[:, k]
        total += part
    return total


def library(splits_k_at: int | None, flips_a_bit_of: tuple[int, int] | None = None) -> Any:
    """A GEMM that adds K in one order, but in a call of `splits_k_at` rows in two halves.

    Args:
        splits_k_at: None where it never does.
        flips_a_bit_of: (rows of the call, row of it) whose last value has its last bit turned over.
    """

    def gemm(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
        rows = x.shape[0]
        y.copy_(in_order(x, weight, 2 if rows == splits_k_at else 1))
        if flips_a_bit_of and rows == flips_a_bit_of[0]:
            y.view(torch.int16)[flips_a_bit_of[1], -1] ^= 1

    return gemm


@pytest.mark.parametrize("out_fp32", [False, True])
def test_probe_accepts_rows_of_one_order(out_fp32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_start, "gemm", library(None))
    shape = GemmShape(64, 128, SMALL, out_fp32)
    check_rows(shape, CPU)
    assert has_passed(shape, CPU)


@pytest.mark.parametrize("rows", probed_rows(SMALL)[:-1])
@pytest.mark.parametrize("out_fp32", [False, True])
def test_control_probe_refuses_a_call_that_splits_k(
    rows: int, out_fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a call of one row, and also where bf16 rounds most differences away."""
    monkeypatch.setattr(linear_start, "gemm", library(rows))
    shape = GemmShape(32, 256, SMALL, out_fp32)
    with pytest.raises(NumericsError, match=f"between M={rows} and M={SMALL} on cpu"):
        check_rows(shape, CPU)
    assert not has_passed(shape, CPU)


@pytest.mark.parametrize("row", [0, 16])
def test_control_probe_refuses_one_flipped_bit(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_start, "gemm", library(None, flips_a_bit_of=(17, row)))
    with pytest.raises(NumericsError, match="M=17"):
        check_rows(GemmShape(64, 96, SMALL), CPU)


def bf16_share_that_shows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[M] share of each row's bf16 results that change where K is split in two."""
    whole, split = (in_order(x, weight, parts).bfloat16() for parts in (1, 2))
    return (whole.view(torch.int16) != split.view(torch.int16)).float().mean(1)


def test_operands_show_the_order_of_additions_in_every_row() -> None:
    x, weight = GemmShape(64, 576, 9).operands(9, CPU)
    assert bool((x.double() @ weight.double().t() == 0).all())
    assert bf16_share_that_shows(x, weight).min() > 0.3


def test_control_ordinary_operands_hide_it_behind_the_rounding() -> None:
    x = torch.randn(9, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.randn(64, 576, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert bf16_share_that_shows(x, weight).min() == 0


def test_grouped_operands_show_the_order_of_additions_in_every_row() -> None:
    x, weight, ids = grouped_start.GroupedGemmShape(4, 64, 576, 9).operands(9, CPU)
    shares = [bf16_share_that_shows(x[[row]], weight[ids[row, 0]]) for row in range(9)]
    assert min(shares) > 0.3


def test_users_of_one_machine_do_not_share_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder for temporary files is shared; another user's file there cannot be opened."""
    monkeypatch.setattr(start.tempfile, "gettempdir", lambda: str(tmp_path))
    for user in (1000, 1001):
        monkeypatch.setattr(start.os, "getuid", lambda user=user: user)
        with start._one_at_a_time():
            pass
    assert len(list(tmp_path.iterdir())) == 2
