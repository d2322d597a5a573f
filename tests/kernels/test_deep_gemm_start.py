"""How the start shares out what is to be compiled; what it finds is tested beside each op."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from consistent_kernels import deep_gemm_start as start
from consistent_kernels.deep_gemm_start import PIECES, probed_rows
from consistent_kernels.linear.deep_gemm_start import GemmShape

SHAPES = [GemmShape(64 * index, 128, rows) for index, rows in enumerate((16384, 16384, 300, 1), 1)]


@pytest.mark.parametrize("processes", [1, 3, 12, 1000])
def test_every_row_count_is_compiled_by_one_process(processes: int) -> None:
    jobs = start._shared_out(SHAPES, processes)
    assert 0 < len(jobs) <= processes
    given = [(shape, rows) for job in jobs for shape, many in job for rows in many]
    wanted = [(shape, rows) for shape in SHAPES for rows in probed_rows(shape.max_rows)]
    assert sorted(given) == sorted(wanted)


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
