"""A result file: a JSON list of rows, into which later runs merge theirs by a key."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from consistent_kernels.errors import invalid

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
    """Merge `new` into the file, replacing it in one step, and return all of its rows."""
    rows = merged(read_rows(path), new, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(rows, indent=2) + "\n")
    os.replace(partial, path)
    return rows
