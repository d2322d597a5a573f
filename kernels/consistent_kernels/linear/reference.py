"""Linear in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch

from consistent_kernels.linear.spec import TILE_ROWS


def linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y = round(x W^T + b), one fixed [16, K] x [K, N] fp32 GEMM a tile of rows.

    A library GEMM chooses its kernel, and so its order of additions, from the whole shape. Every
    call here has the same shape (a short tile is padded with zero rows), so a row's bits cannot
    depend on the number of rows.

    Args:
        x: [T, K].
        weight: [N, K] fp32, holding values of the model dtype (see `prepare_weight`).
        bias: [N] or None.
        out_dtype: dtype of the one rounding; fp32 rounds nothing.

    Returns:
        [T, N] in `out_dtype`.
    """
    rows, width = x.shape
    padded = -(-rows // TILE_ROWS) * TILE_ROWS
    if padded == rows:
        x32 = x.float().contiguous()
    else:
        x32 = torch.zeros((padded, width), dtype=torch.float32, device=x.device)
        x32[:rows] = x
    out = torch.empty((padded, weight.shape[0]), dtype=torch.float32, device=x.device)
    transposed = weight.t()
    for start in range(0, padded, TILE_ROWS):
        stop = start + TILE_ROWS
        torch.mm(x32[start:stop], transposed, out=out[start:stop])
    if bias is not None:
        out += bias.float()
    return out[:rows].to(out_dtype)


def linear_bwd_ref(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """grad_x = g W, grad_weight = g^T x, grad_bias = sum over rows of g; fp32 accumulation.

    Args:
        grad_y: [T, N]; x: [T, K]; weight: [N, K] prepared.
        needs: which of (x, weight, bias) want a gradient.

    Returns:
        (grad_x [T, K] in the dtype of x, grad_weight [N, K] fp32, grad_bias [N] fp32).
    """
    g32 = grad_y.float()
    grad_x = (g32 @ weight.float()).to(x.dtype) if needs[0] else None
    grad_weight = g32.t() @ x.float() if needs[1] else None
    grad_bias = g32.sum(0) if needs[2] else None
    return grad_x, grad_weight, grad_bias
