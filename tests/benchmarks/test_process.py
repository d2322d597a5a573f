"""The benchmark's processes: answers in order, errors with their cause, death with its log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rollout.process import Process, ProcessError

SUPPORT = Path(__file__).resolve().parents[1] / "support"
KERNELS = SUPPORT.parents[1] / "kernels"


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    path = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1]), str(KERNELS)])
    made = Process("echo", "echo_process", {"ECHO": "set", "PYTHONPATH": path}, tmp_path)
    yield made
    made.close()


def test_calls_are_answered_in_order_with_the_given_environment(process: Process) -> None:
    process.send("say", text="a")
    process.send("say", text="b")
    assert process.result() == ("a", "set")
    assert process.result() == ("b", "set")


def test_an_error_there_is_an_error_here_and_the_process_goes_on(process: Process) -> None:
    with pytest.raises(ProcessError, match="no such weight"):
        process.call("fail")
    assert process.call("say", text="still here")[0] == "still here"


def test_a_process_that_dies_is_named_with_its_log(process: Process) -> None:
    with pytest.raises(ProcessError, match=r"echo ended with code 7(.|\n)*the last words"):
        process.call("die")


def test_close_ends_the_process(process: Process) -> None:
    process.call("say", text="ready")
    begin = time.perf_counter()
    process.close()
    assert process._process.returncode is not None
    assert time.perf_counter() - begin < 15, "it ended by itself, not by a signal"
