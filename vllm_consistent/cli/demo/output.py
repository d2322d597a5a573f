"""The folder a run writes to, and where the engine's own messages go."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from vllm_consistent.cli.demo.errors import OutputFolderError
from vllm_consistent.cli.demo.metrics import write_atomically

_LOCK = ".lock"
_CHECKPOINT_BYTES_PER_MODEL_BYTE = 6  # fp32 master and two moments for each bf16 weight


class OutputFolder:
    """Paths of one run, held by one process at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.report = root / "report.html"
        self.summary = root / "summary.json"
        self.run = root / "run.json"
        self.stock = root / "stock.json"
        self.checkpoints = root / "checkpoints"
        self.logs = root / "logs"
        self.engine_log = self.logs / "engine.log"
        self._lock: IO[str] | None = None

    def check_before_start(self, resume: bool) -> None:
        """Refuse a folder that a new run would overwrite, or that holds nothing to resume.

        Raises:
            OutputFolderError: with what to do. Nothing is created or changed.
        """
        if self.root.exists() and not self.root.is_dir():
            raise OutputFolderError(f"demo: --out must be a folder, got the file {self.root}")
        if resume and not self.run.is_file():
            raise OutputFolderError(
                f"demo --resume: {self.root} holds no run (no {self.run.name}); "
                "name the folder of an earlier run with --out"
            )
        if not resume and self.root.is_dir() and any(self.root.iterdir()):
            raise OutputFolderError(
                f"demo: {self.root} is not empty; add --resume to continue that run, or name "
                "another folder with --out"
            )

    def open(self, model_bytes: int) -> None:
        """Create the folder, lock it, and make sure that checkpoints will fit.

        Args:
            model_bytes: size of the bf16 weights.

        Raises:
            OutputFolderError: not writable, in use by another run, or too little space.
        """
        before = self.root.is_dir(), self.logs.is_dir()
        try:
            self._open(model_bytes)
        except OutputFolderError:
            self._take_back(*before)
            raise

    def _take_back(self, had_root: bool, had_logs: bool) -> None:
        # A folder of which nothing came must not look used when the command is given again.
        if self._lock is None:
            return
        self.close()
        with contextlib.suppress(OSError):
            if not had_logs:
                (self.root / _LOCK).unlink()
                self.logs.rmdir()
            if not had_root:
                self.root.rmdir()

    def _open(self, model_bytes: int) -> None:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._lock = (self.root / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise OutputFolderError(f"demo: another run is writing to {self.root}") from error
        except OSError as error:
            raise OutputFolderError(f"demo: --out {self.root} is not writable: {error}") from error
        held = sum(file.stat().st_size for file in self.checkpoints.rglob("*.safetensors"))
        needed = 2 * _CHECKPOINT_BYTES_PER_MODEL_BYTE * model_bytes - held
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise OutputFolderError(
                f"demo: checkpoints need {needed / 1e9:.1f} GB in {self.root}, "
                f"{free / 1e9:.1f} GB are free; make room or name another folder with --out"
            )

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_json(self, path: Path, record: dict[str, Any]) -> None:
        """Write `record` atomically; raises RunError when the folder is not writable."""
        write_atomically(path, json.dumps(record, indent=1) + "\n")

    def read_run(self) -> dict[str, Any]:
        """Return what `run.json` recorded.

        Raises:
            OutputFolderError: it cannot be read.
        """
        try:
            record = json.loads(self.run.read_text())
            if not isinstance(record, dict) or "options" not in record:
                raise ValueError("no options in it")
        except (OSError, ValueError) as error:
            raise OutputFolderError(f"demo --resume: {self.run} cannot be read: {error}") from error
        return record


def private_copy(stream: IO[str]) -> IO[str]:
    """Return a stream that still reaches the terminal while `messages_to` captures it."""
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError, io.UnsupportedOperation):
        return stream  # not backed by a descriptor, so nothing captures it
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="replace")


@contextlib.contextmanager
def messages_to(log: Path) -> Iterator[None]:
    """Send whatever this process writes to stdout and stderr, native code included, to `log`.

    vLLM logs to stdout, where the JSON summary goes, and warns from native code.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("a"))
        for stream in (sys.stdout, sys.stderr):
            try:
                descriptor = stream.fileno()
            except (OSError, ValueError, io.UnsupportedOperation):
                continue
            stream.flush()
            saved = os.dup(descriptor)
            os.dup2(file.fileno(), descriptor)
            stack.callback(_restore, stream, saved, descriptor)
        yield


def log_error(error: BaseException) -> None:
    """Write a traceback where `messages_to` sends it; a full disk must not raise another error."""
    with contextlib.suppress(OSError):
        traceback.print_exception(error)


def _restore(stream: IO[str], saved: int, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        stream.flush()
    os.dup2(saved, descriptor)
    os.close(saved)
