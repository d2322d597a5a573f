"""A process that answers calls over a pipe, with its own environment and log file."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.record import ROOT
from benchmarks.env import variables
from consistent_kernels.errors import ConsistencyError

_LOG_LINES = 40
_CLOSE_AFTER_S = 20


class ProcessError(ConsistencyError):
    """A benchmark process failed or died; the message holds its traceback or its log's end."""


class Process:
    """The caller's end.

    Args:
        name: for messages and the log file.
        module: run as `python -m module FD`; its main calls `serve`.
        environment: added to this process's own.
        logs: folder of the log file.
    """

    def __init__(self, name: str, module: str, environment: Mapping[str, str], logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = logs / f"{name}.log"
        self._pipe, theirs = multiprocessing.Pipe()
        with self.log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                env=variables() | dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                # A group, so that `close` reaches its children; no session of its own, so that
                # whoever ends ours ends it too.
                process_group=0,
            )
        theirs.close()

    def send(self, method: str, **arguments: Any) -> None:
        """Start a call; `result` waits for it. Calls are answered in order."""
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise self._died() from error

    def result(self) -> Any:
        """Return the answer to the oldest call not answered yet.

        Raises:
            ProcessError: the call raised there, or the process is gone.
        """
        try:
            fine, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if not fine:
            raise ProcessError(f"{self.name}: {value}(log: {self.log})")
        return value

    def call(self, method: str, **arguments: Any) -> Any:
        """Call and wait."""
        self.send(method, **arguments)
        return self.result()

    def close(self) -> None:
        """End the process and its children, and wait until its memory is free."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_CLOSE_AFTER_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _died(self) -> ProcessError:
        try:
            self._process.wait(timeout=_CLOSE_AFTER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        tail = "\n".join(lines)
        return ProcessError(
            f"{self.name} ended with code {self._process.returncode}; {self.log} ends with:\n{tail}"
        )


def serve(handler: object) -> None:
    """Answer calls of `handler`'s public methods until the caller closes the pipe."""
    pipe = multiprocessing.connection.Connection(int(sys.argv[1]))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            sys.stderr.flush()
            os._exit(0)  # an engine's own teardown takes long; the driver frees its memory
        try:
            answer = (True, getattr(handler, method)(**arguments))
        except Exception:
            answer = (False, traceback.format_exc())
            sys.stderr.write(answer[1])
        sys.stderr.flush()
        pipe.send(answer)
