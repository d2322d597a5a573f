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
from consistent_kernels.experts.deep_gemm_grouped import grouped_gemm, is_masked, is_served
from consistent_kernels.experts.deep_gemm_places import expert_places
from consistent_kernels.experts.deep_gemm_rows import activate, from_places, to_places
from consistent_kernels.experts.deep_gemm_start import start


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
