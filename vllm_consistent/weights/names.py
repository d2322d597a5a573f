"""Splits vLLM's fused tensors back into the names that the trainer knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from consistent_kernels.quantization.parameters import SCALE_SUFFIX
from consistent_kernels.quantization.spec import GROUP

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""vLLM's fused module to the Hugging Face modules that it holds, in row order."""

EXPERTS = {
    "w13_weight": "gate_up_proj",
    "w13_weight_scale_inv": "gate_up_proj_scale_inv",
    "w2_weight": "down_proj",
    "w2_weight_scale_inv": "down_proj_scale_inv",
}
"""Parameters of vLLM's RoutedExperts to those of the Hugging Face module that holds it."""


def hf_views(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {Hugging Face name: view into vLLM's storage} for every weight that is served.

    A tied head is not listed (it is the embedding); rows that pad the vocabulary are cut.
    """
    views: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            for name, view in _split(path, module, local, parameter.data):
                views[name] = view
    return dict(sorted(views.items()))


@dataclasses.dataclass(frozen=True)
class HeldExperts:
    """Which rows of a stacked parameter are here.

    Attributes:
        rows: experts [start, stop).
        total: experts of the whole parameter.
    """

    rows: slice
    total: int


def held_experts(model: torch.nn.Module) -> dict[str, HeldExperts]:
    """Return {Hugging Face name: rows} of the stacked parameters that ranks share."""
    held = {}
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        if leaf != "routed_experts" or module.held == slice(0, module.global_num_experts):
            continue
        for local, _ in module.named_parameters(recurse=False):
            held[f"{parent}.{EXPERTS[local]}"] = HeldExperts(module.held, module.global_num_experts)
    return held


def checkpoint_parts(
    views: dict[str, torch.Tensor], held: Mapping[str, HeldExperts]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return {stacked name: {name of one expert's matrix in a published checkpoint: its view}}.

    Args:
        views: of `hf_views`; transformers stacks experts, files hold them one by one.
        held: of `held_experts`.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, stacked in views.items():
        module, _, parameter = name.rpartition(".")
        if not module.endswith(".experts"):
            continue
        matrix_name = parameter.removesuffix(SCALE_SUFFIX)
        suffix = parameter.removeprefix(matrix_name)
        leaves = FUSED.get(matrix_name, (matrix_name,))
        first = held[name].rows.start if name in held else 0
        parts[name] = {
            f"{module}.{expert}.{leaf}.weight{suffix}": rows
            for expert, matrix in enumerate(stacked, start=first)
            for leaf, rows in zip(leaves, matrix.chunk(len(leaves)), strict=True)
        }
    return parts


def expected_shapes(
    views: dict[str, torch.Tensor], held: Mapping[str, HeldExperts]
) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of every tensor that an update may hold: stacks and single experts.

    Args:
        views: of `hf_views`; held: of `held_experts`. Experts of other ranks are named too.
    """
    shapes = {name: tuple(view.shape) for name, view in views.items()}
    for name, share in held.items():
        shapes[name] = (share.total, *shapes[name][1:])
    # One expert stands for all: the names of the others come from the number of experts.
    whole = {
        name: torch.empty((1, *shape[1:]), device="meta", dtype=torch.bfloat16).expand(shape)
        for name, shape in shapes.items()
    }
    for parts in checkpoint_parts(whole, {}).values():
        shapes |= {name: tuple(part.shape) for name, part in parts.items()}
    return shapes


def _split(
    path: str, module: Any, local: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    parent, _, leaf = path.rpartition(".")
    if leaf == "routed_experts":
        yield f"{parent}.{EXPERTS[local]}", tensor
        return
    parts = FUSED.get(leaf)
    if parts is not None:
        rows = GROUP if local.endswith(SCALE_SUFFIX) else 1
        pieces = tensor.split([size // rows for size in module.output_partition_sizes])
        for part, piece in zip(parts, pieces, strict=True):
            yield f"{parent}.{part}.{local}", piece
        return
    vocab = getattr(module, "org_vocab_size", None)
    yield f"{path}.{local}", tensor if vocab is None else tensor[:vocab]
