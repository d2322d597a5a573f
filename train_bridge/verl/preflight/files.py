"""Rules about files that verl opens only after Ray has started: the model's and the data's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from omegaconf import ListConfig

from train_bridge.verl.preflight.view import View, Violation

MODEL = "actor_rollout_ref.model.path"
DATA = ("data.train_files", "data.val_files")
_PLACEHOLDERS = ("~/models/", "~/data/rlhf/")
"""Where verl's own defaults point to: a configuration that is shipped names no files."""

_WEIGHTS = ("*.safetensors", "*.bin")
_FORMATS = (".parquet", ".json", ".jsonl")


def violations(view: View, *, to_run: bool) -> Iterator[Violation]:
    """Yield files that are not there; remote ones and names on the hub are not looked for.

    Args:
        view: the configuration.
        to_run: whether verl's placeholders count as missing.
    """
    yield from _model(view, to_run)
    if view.get("data.custom_cls.path"):
        return
    for key in DATA:
        yield from _data(view, key, to_run)


def _model(view: View, to_run: bool) -> Iterator[Violation]:
    name = view.value(MODEL, "")
    if not isinstance(name, str) or not name.strip():
        yield Violation(MODEL, name, "there is no model", "a folder, or a name on the hub")
        return
    if _is_remote(name) or (_is_placeholder(name) and not to_run):
        return
    folder = Path(name)
    if name.startswith("~"):
        yield Violation(
            MODEL, name, "verl does not expand ~ in it", f"{folder.expanduser()}, if that is meant"
        )
    elif folder.exists():
        if not (folder / "config.json").is_file():
            yield Violation(MODEL, name, "it holds no config.json", "a checkpoint's folder")
        elif not any(any(folder.glob(weights)) for weights in _WEIGHTS):
            yield Violation(MODEL, name, "it holds no weights", "a checkpoint's folder")
    elif folder.is_absolute() or name.startswith(".") or len(folder.parts) > 2:
        yield Violation(MODEL, name, "there is no such folder", "a folder, or a name on the hub")


def _data(view: View, key: str, to_run: bool) -> Iterator[Violation]:
    value = view.value(key, None)
    names = list(value) if isinstance(value, ListConfig | list) else [value]
    if not names:
        yield Violation(key, value, "there are no data", "parquet files in verl's format")
    for name in names:
        if not isinstance(name, str) or not name.strip():
            yield Violation(key, name, "there are no data", "parquet files in verl's format")
        elif _is_remote(name) or (_is_placeholder(name) and not to_run):
            continue
        elif not Path(name).expanduser().is_file():
            yield Violation(key, name, "there is no such file", "a parquet file in verl's format")
        elif not name.endswith(_FORMATS):
            yield Violation(key, name, "verl does not read this format", " or ".join(_FORMATS))


def _is_remote(name: str) -> bool:
    return "://" in name


def _is_placeholder(name: str) -> bool:
    return name.startswith(_PLACEHOLDERS)
