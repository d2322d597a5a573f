"""Experts, tokens and routings that make the usual mistakes of grouped GEMMs visible."""

from __future__ import annotations

import dataclasses

import torch

from consistent_kernels.experts import prepare_expert_weight
from consistent_kernels.testing import hazard_activations


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a layer: experts E, experts of a token K, hidden H, expert width I."""

    experts: int
    slots: int
    hidden: int
    width: int


SHAPES = {
    "tiny": Shape(8, 2, 64, 64),
    "ragged": Shape(5, 3, 72, 40),
    "qwen3-like": Shape(16, 4, 192, 128),
}


def masters(shape: Shape, device: str, *, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 master weights (w13 [E, 2 I, H], w2 [E, H, I])."""
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn((shape.experts, 2 * shape.width, shape.hidden), generator=generator) * 0.05
    w2 = torch.randn((shape.experts, shape.hidden, shape.width), generator=generator) * 0.1
    return w13.to(device), w2.to(device)


def prepared(
    shape: Shape, impl: str, device: str, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """The masters in the form that `experts` of `impl` reads."""
    w13, w2 = (
        prepare_expert_weight(weight, dtype=dtype, impl=impl) for weight in masters(shape, device)
    )
    return w13, w2


def tokens(
    shape: Shape, rows: int, device: str, *, seed: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[rows, H] with outliers, ties and signed zeros."""
    return hazard_activations((rows, shape.hidden), seed=seed, dtype=dtype, device=device)


def routing(
    shape: Shape, rows: int, device: str, *, seed: int, skew: float = 1.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct expert ids [rows, K] and weights [rows, K] fp32.

    Low ids are chosen often and the last expert never; every 11th row goes nowhere, every 7th has
    an empty last slot.
    """
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand((rows, shape.experts), generator=generator)
    score = score ** (1.0 + skew * torch.arange(shape.experts) / shape.experts)
    score[:, -1] = -1.0
    ids = torch.topk(score, shape.slots, dim=-1).indices.int()
    weights = torch.rand((rows, shape.slots), generator=generator)
    ids[::11] = -1
    ids[::7, -1] = -1
    return ids.to(device), weights.to(device)
