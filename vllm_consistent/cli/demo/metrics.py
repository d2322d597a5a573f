"""The numbers of a step, under verl's names where it has them, and the file that keeps them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_consistent.cli.demo.errors import RunError

STOCK = "stock/"
Row = dict[str, Any]


def spread(name: str, values: Sequence[float]) -> Row:
    """Return {name/mean, name/max, name/min}."""
    return {
        f"{name}/mean": math.fsum(values) / len(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }


def prefixed(prefix: str, row: Mapping[str, Any]) -> Row:
    """Return `row` with `prefix` before every name."""
    return {f"{prefix}{name}": value for name, value in row.items()}


def plain(value: Any) -> Any:
    """Return JSON types only; a non-finite float becomes its text, which strict JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class MetricsFile:
    """`metrics.jsonl`: one JSON object per finished step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Row) -> None:
        """Add the line of a step.

        Raises:
            RunError: it could not be written.
        """
        try:
            with self.path.open("a") as stream:
                stream.write(_line(row))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise RunError(f"{self.path} could not be written: {error}") from error

    def rewrite(self, rows: Sequence[Row]) -> None:
        """Replace the file by `rows`, at once: what a resumed run starts from.

        Raises:
            RunError: it could not be written; the file is as before.
        """
        write_atomically(self.path, "".join(map(_line, rows)))


def _line(row: Row) -> str:
    return json.dumps(plain(row), allow_nan=False) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename it into place.

    Raises:
        RunError: it could not be written; `path` is as before.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written: {error}") from error
