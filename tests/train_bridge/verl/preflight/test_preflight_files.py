"""Files that verl would miss only after Ray has started."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="the verl extra is not installed")

from train_bridge.verl.preflight.files import DATA, MODEL, violations
from train_bridge.verl.preflight.view import View

pytestmark = pytest.mark.verl


def named(base: Any, *, to_run: bool = False, **changes: Any) -> list[str]:
    from omegaconf import OmegaConf

    config = copy.deepcopy(base)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    return [found.key for found in violations(View(config), to_run=to_run)]


def test_placeholders_count_when_it_is_about_to_run(base: Any) -> None:
    assert named(base) == []
    assert named(base, to_run=True) == [MODEL, *DATA]


@pytest.mark.parametrize("name", ["", None, "/none/such", "./none", "a/b/c", "~/none"])
def test_a_missing_model_is_named(name: str | None, base: Any) -> None:
    assert named(base, **{MODEL: name}) == [MODEL]


@pytest.mark.parametrize("name", ["owner/name", "hdfs://host/model"])
def test_a_remote_model_is_left_to_the_workers(name: str, base: Any) -> None:
    assert named(base, **{MODEL: name}) == []


def test_a_folder_must_hold_a_checkpoint(base: Any, tmp_path: Path) -> None:
    assert named(base, **{MODEL: str(tmp_path)}) == [MODEL]
    (tmp_path / "config.json").write_text("{}")
    assert named(base, **{MODEL: str(tmp_path)}) == [MODEL]
    (tmp_path / "model.safetensors").touch()
    assert named(base, **{MODEL: str(tmp_path)}) == []


@pytest.mark.parametrize("key", DATA)
def test_data_must_be_there(key: str, base: Any, tmp_path: Path) -> None:
    file, text = tmp_path / "a.parquet", tmp_path / "a.csv"
    file.touch()
    text.touch()
    assert named(base, **{key: str(file)}) == []
    assert named(base, **{key: "hdfs://host/a.parquet"}) == []
    for wrong in (None, "", [], 3, str(tmp_path), str(text), str(tmp_path / "b.parquet")):
        assert named(base, **{key: wrong}) == [key]
    assert named(base, **{key: [str(file), str(tmp_path / "b.parquet")]}) == [key]
    own = {key: "anything", "data.custom_cls.path": "mine.py"}
    assert named(base, **own) == []
