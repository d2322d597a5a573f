"""A bridged GPTModel's weights in the files of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from consistent_kernels.errors import InvalidInputError
from train_bridge.megatron.conversion import hf_named, megatron_named
from train_bridge.modules import unwrapped

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class CheckpointTensors(Mapping[str, torch.Tensor]):
    """The tensors of a folder's .safetensors files, each read when it is asked for.

    Raises:
        InvalidInputError: the folder holds none.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / _INDEX
        if index.is_file():
            self._files = json.loads(index.read_text())["weight_map"]
        elif (folder / _SINGLE).is_file():
            with safe_open(folder / _SINGLE, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise InvalidInputError(
                f"checkpoint: {folder} must hold {_SINGLE} or {_INDEX}, and does not. Save the "
                "model with save_pretrained"
            )
        self._folder = folder
        self._open: dict[str, Any] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        return self._open[file].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load_hf_checkpoint(model: nn.Module, folder: Path | str) -> None:
    """Copy a checkpoint's weights into a bridged GPTModel, in place; they count as changed.

    Args:
        model: bridged, also inside megatron-core's wrappers.
        folder: with .safetensors files under Hugging Face names, experts stacked or one by one.

    Raises:
        InvalidInputError: no such files; a name is missing or unknown.
    """
    inner = unwrapped(model)
    tensors = CheckpointTensors(Path(folder))
    padded = inner.embedding.word_embeddings.weight.shape[0]
    parameters = dict(inner.named_parameters())
    try:
        with torch.no_grad():
            for name, tensor in megatron_named(tensors, inner.state.facts, vocab_rows=padded):
                parameters[name].copy_(tensor)
    finally:
        inner.state.version.bump()


def save_hf_checkpoint(model: nn.Module, folder: Path | str) -> None:
    """Write a bridged GPTModel's weights to `folder`/model.safetensors, experts stacked.

    Args:
        model: bridged, also inside megatron-core's wrappers; TP 1, so any one rank holds all.
        folder: made where it is absent.
    """
    inner = unwrapped(model)
    named = hf_named(dict(inner.named_parameters()), inner.state.facts)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named}
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(folder) / _SINGLE, metadata={"format": "pt"})
