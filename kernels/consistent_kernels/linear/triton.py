"""Linear in Triton: the launcher, with the tile that serves so many rows."""

from __future__ import annotations

import torch

from consistent_kernels.linear.triton_kernel import launch
from consistent_kernels.linear.triton_tiles import tile_for


def linear_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the kernel.

    Args:
        x: [M, K]; weight: [N, K] contiguous, dtype of x; bias: [N] or None.
        out_dtype: dtype of the result.

    Returns:
        [M, N].
    """
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    launch(x, weight, bias, y, tile_for(x, weight.shape[0]))
    return y
