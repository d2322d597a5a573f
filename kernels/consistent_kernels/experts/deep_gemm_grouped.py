"""DeepGEMM's grouped BF16 GEMMs over places, and which layout serves how many tokens."""

from __future__ import annotations

import torch

from consistent_kernels.deep_gemm_start import parts
from consistent_kernels.experts.deep_gemm_places import Places, capacity_of
from consistent_kernels.vendored import deep_gemm

INNER_STEP = 64
"""DeepGEMM's grouped BF16 GEMMs take K in whole tiles."""

MASKED_HINT = 64
"""Rows of an expert that DeepGEMM is told to expect in the masked layout: with one number there is
one kernel. It walks the counts on the device, so more or fewer rows only cost time."""

MASKED_TOKENS, MASKED_PLACES = 256, 1 << 15
"""Layout "fastest" is the masked one up to this many tokens and places (E times as many, rounded
up, and memory for each)."""


def is_served(hidden: int, width: int) -> bool:
    """Whether DeepGEMM computes a layer of hidden size H and expert width I; else Triton does."""
    return hidden % INNER_STEP == 0 and width % INNER_STEP == 0


def grouped_gemm(x: torch.Tensor, weight: torch.Tensor, places: Places) -> torch.Tensor:
    """y[p] = round(x[p] weight[expert of p]^T) for the places in use; the others are undefined.

    Args:
        x: [places, K] bf16 contiguous.
        weight: [E, N, K] bf16 contiguous.
        places: from `expert_places`.

    Returns:
        [places, N] bf16.
    """
    experts, columns, inner = weight.shape
    y = torch.empty((x.shape[0], columns), dtype=x.dtype, device=x.device)
    library = deep_gemm()
    if places.capacity is not None:
        shape = (experts, places.capacity)
        rows, out = x.view(*shape, inner), y.view(*shape, columns)
        library.m_grouped_bf16_gemm_nt_masked(rows, weight, out, places.count, MASKED_HINT)
        return y
    # Experts stand one after the other: a cut makes at most one expert's weight be read twice.
    for part in parts(x.shape[0]):
        library.m_grouped_bf16_gemm_nt_contiguous(x[part], weight, y[part], places.expert[part])
    return y


def is_masked(layout: str, tokens: int, experts: int) -> bool:
    """Return whether rows are laid out in the masked layout."""
    if layout != "fastest":
        return layout == "masked"
    return tokens <= MASKED_TOKENS and experts * capacity_of(tokens) <= MASKED_PLACES
