"""Checkpoints: masters, optimizer, random state and metrics, written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_consistent.cli.demo.errors import CheckpointError, RunError

_FORMAT = 1
_PREFIX = "step-"
_PARTIAL = ".partial-"
_STATE = "state.json"
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `load_latest` found.

    Attributes:
        step: optimizer steps done when it was written.
        groups: tensors by group ("masters", "optimizer", "random") and name.
        state: plain JSON data stored beside them.
    """

    step: int
    groups: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save(
    folder: Path, step: int, groups: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of `step` and remove older ones once it is complete.

    Files are flushed to disk, then the folder is renamed: an interruption at any point leaves the
    previous checkpoint usable.

    Raises:
        RunError: the disk is full or not writable; the previous checkpoint is untouched.
    """
    final = folder / f"{_PREFIX}{step:06d}"
    partial = folder / f"{_PARTIAL}{step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        crc = {}
        for name, tensors in groups.items():
            file = partial / f"{name}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
            crc[file.name] = _flush_and_crc(file)
        record = {"format": _FORMAT, "step": step, "crc32": crc, **state}
        with (partial / _STATE).open("w") as stream:
            json.dump(record, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        _flush_folder(folder)
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        raise RunError(
            f"checkpoint of step {step} could not be written to {folder}: {error} "
            f"({free / 1e9:.1f} GB free). Earlier results are kept; make room and add --resume."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in _complete(folder):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def _flush_and_crc(file: Path) -> int:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return _crc(file)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if (path / _STATE).is_file())


def exists(folder: Path) -> bool:
    """Return whether `folder` holds a complete checkpoint."""
    return bool(_complete(folder))


def _newest(folder: Path) -> Path:
    complete = _complete(folder)
    if not complete:
        raise CheckpointError(
            f"demo --resume: no complete checkpoint in {folder}; start without --resume"
        )
    return complete[-1]


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / _STATE).read_text())
        found = state["format"]
        state["step"], state["crc32"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{_STATE} cannot be read ({error})") from error
    if found != _FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {found}, this version reads {_FORMAT}; resume it with "
            "the version that wrote it"
        )
    return state


def load_latest(folder: Path) -> Checkpoint:
    """Load the newest checkpoint in `folder`, every byte checked.

    Raises:
        CheckpointError: none is there, or a file is missing, truncated or changed. Nothing is
            deleted.
    """
    path = _newest(folder)
    state = _read_state(path)
    groups = {}
    for file_name, expected in state["crc32"].items():
        file = path / file_name
        if not file.is_file():
            raise _damaged(path, f"{file_name} is missing")
        actual = _crc(file)
        if actual != expected:
            raise _damaged(path, f"{file_name} has CRC-32 {actual:08x}, written {expected:08x}")
        try:
            groups[file.stem] = load_file(file)
        except SafetensorError as error:
            raise _damaged(path, f"{file_name} cannot be read ({error})") from error
    return Checkpoint(state["step"], groups, state)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} is damaged: {why}. It was left as it is; restore it from a copy, or "
        "start a new run in another --out."
    )
