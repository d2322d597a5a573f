"""BF16 experts by DeepGEMM's grouped GEMMs, out of the binary that vLLM ships.

Rows go to aligned places, through the first GEMM, the activation, the second GEMM, and back to
their slots, without waiting for the device. A tile holds rows of one expert, and K is added in the
steps of the MMA instruction whatever the tile; `consistent_kernels.experts.deep_gemm_start` shows,
for every shape of a model and on the machine itself, that a row's bits follow neither the layout
nor the number of rows.

A layer whose hidden size or expert width is no multiple of 64 runs the Triton kernel: a property
of the layer, never of the batch.
"""

from __future__ import annotations

import torch

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.experts.deep_gemm_places import (
    PLACE_STEPS,
    Places,
    capacity_of,
    expert_places,
)
from consistent_kernels.experts.deep_gemm_rows import activate, from_places, to_places
from consistent_kernels.vendored import deep_gemm

INNER_STEP = 64
"""DeepGEMM's grouped BF16 GEMMs take K in whole tiles."""

CALLS = (16384, 8192, 4096, 2048, 1024, 512)
"""Places of one contiguous call, largest first: one kernel each. Experts stand one after the other,
so a cut makes at most one expert's weight be read twice."""

MASKED_HINT = 64
"""Rows of an expert that DeepGEMM is told to expect in the masked layout: with one number there is
one kernel. It walks the counts on the device, so more or fewer rows only cost time."""

MASKED_TOKENS, MASKED_PLACES = 256, 1 << 15
"""Layout "fastest" is the masked one up to this many tokens and places (E times as many, rounded
up, and memory for each)."""


def is_served(hidden: int, width: int) -> bool:
    """Whether DeepGEMM computes a layer of hidden size H and expert width I; else Triton does."""
    return hidden % INNER_STEP == 0 and width % INNER_STEP == 0


def calls(places: int) -> list[int]:
    """Return the sizes of the calls that serve so many contiguous places, in order."""
    assert places % PLACE_STEPS[0] == 0
    sizes = []
    for size in CALLS:
        sizes += [size] * (places // size)
        places %= size
    return sizes


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
    start = 0
    for size in calls(x.shape[0]):
        part = slice(start, start + size)
        library.m_grouped_bf16_gemm_nt_contiguous(x[part], weight, y[part], places.expert[part])
        start += size
    return y


def is_masked(layout: str, tokens: int, experts: int) -> bool:
    """Return whether rows are laid out in the masked layout."""
    if layout != "fastest":
        return layout == "masked"
    return tokens <= MASKED_TOKENS and experts * capacity_of(tokens) <= MASKED_PLACES


def expert_outputs_deep_gemm(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    layout: str,
) -> torch.Tensor:
    """Launch the kernels; arguments and result as in `consistent_kernels.experts.expert_outputs`.

    Slots that go nowhere are zero, or not written where the Triton kernel serves the layer.

    Raises:
        UnsupportedError: x is not bf16.
        NumericsError: the probe found that bits follow the batch.
    """
    if x.dtype != torch.bfloat16:
        raise UnsupportedError("experts", f"{x.dtype} with impl 'deep_gemm'", ["torch.bfloat16"])
    tokens, slots = ids.shape
    experts, columns, width = w2.shape
    if not is_served(x.shape[1], width):
        from consistent_kernels.experts import triton

        return triton.expert_outputs_fwd(x, w13, w2, ids, limit, layout)
    if not tokens:
        return x.new_empty((0, slots, columns))
    from consistent_kernels.experts.deep_gemm_start import start

    for weight in (w13, w2):
        start(*weight.shape, weight.device)
    flat = aligned(ids.int().contiguous())
    places = expert_places(flat, experts, masked=is_masked(layout, tokens, experts))
    gate_up = grouped_gemm(to_places(aligned_rows(x), places, slots), aligned(w13), places)
    hidden = activate(gate_up, places, limit)
    del gate_up  # the largest buffer
    return from_places(grouped_gemm(hidden, aligned(w2), places), places).view(
        tokens, slots, columns
    )
