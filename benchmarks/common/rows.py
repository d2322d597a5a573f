"""A result file: a JSON list of rows, into which later runs merge theirs by a key."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from consistent_kernels.errors import ConfigurationError, invalid

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of `path`, none where it does not exist.

    Raises:
        InvalidInputError: the file is no JSON list of objects.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text())
    except OSError as error:
        raise invalid("results", str(path), "a file that can be read", error) from error
    except ValueError as error:
        raise invalid("results", str(path), "JSON", error) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise invalid("results", str(path), "a JSON list of objects", type(rows).__name__)
    return rows


def merged(old: Iterable[Row], new: Iterable[Row], key: Sequence[str]) -> list[Row]:
    """Return `old` with each row of `new` in the place of the one with the same key, else last.

    A row without one of the key's fields has None there.
    """
    by_key = {_identity(row, key): row for row in old}
    by_key.update((_identity(row, key), row) for row in new)
    return list(by_key.values())


def _identity(row: Row, key: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in key)


def merge_into(path: Path, new: Iterable[Row], key: Sequence[str]) -> list[Row]:
    """Merge `new` into the file, replacing it in one step, and return all of its rows.

    Processes that merge into one file wait for each other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        rows = merged(read_rows(path), new, key)
        partial = path.with_suffix(path.suffix + ".partial")
        partial.write_text(json.dumps(rows, indent=2) + "\n")
        os.replace(partial, path)
    return rows


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # The folder itself is locked: no file stays behind, and `os.replace` moves nothing from under
    # the lock.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def require_mergeable(paths: Sequence[Path], hardware: str) -> None:
    """Raise where rows of this machine could not be merged into each file, before any are measured.

    Args:
        paths: result files, there or not.
        hardware: of the rows to come.

    Raises:
        InvalidInputError: a file is no JSON list of objects, or cannot be read.
        ConfigurationError: a folder cannot be written to, one file is named twice, or a file holds
            rows of other hardware, which those of this machine would replace.
    """
    if len({path.absolute() for path in paths}) < len(paths):
        raise ConfigurationError([f"{paths[0]} is named twice: give two files"], "results")
    for path in paths:
        others = sorted({str(row.get("hardware")) for row in read_rows(path)} - {hardware})
        if others:
            whose = ", ".join(others)
            raise ConfigurationError(
                [f"{path} holds rows of {whose}, this is {hardware}: give another file"], "results"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError([f"{path.parent}: {error}"], "results") from error
        if not os.access(path.parent, os.W_OK):
            raise ConfigurationError([f"{path.parent} cannot be written to"], "results")
