"""RMSNorm in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch


def _mean_of_squares(x: torch.Tensor) -> torch.Tensor:
    # An explicit halving tree: the order of a library sum may follow the number of rows.
    size = x.shape[-1]
    padded = 1 << (size - 1).bit_length()
    total = x * x
    if padded != size:
        total = torch.nn.functional.pad(total, (0, padded - size))
    while padded > 1:
        padded //= 2
        total = total[..., :padded] + total[..., padded:]
    return total / size


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = round(x * rstd * w) with rstd = 1 / sqrt(mean(x^2) + eps), fp32 up to the one rounding.

    Args:
        x: [..., H], bf16, fp16 or fp32.
        weight: [H].
        eps: added to the mean square, in fp32.

    Returns:
        [..., H] in the dtype of x.
    """
    x32 = x.float()
    rstd = 1.0 / torch.sqrt(_mean_of_squares(x32) + eps)
    return (x32 * rstd * weight.float()).to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = round(x + residual); returns (rms_norm(s), s)."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_ref(total, weight, eps), total


def rms_norm_bwd_ref(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rms_norm, in fp32.

    With n = x * rstd and h = grad_y * w:
    grad_x = rstd * (h - n * mean(h * n)); grad_weight = sum over rows of grad_y * n.

    Args:
        grad_y: [..., H]; x: [..., H]; weight: [H].

    Returns:
        (grad_x [..., H] in the dtype of x, grad_weight [H] fp32).
    """
    x32, g32 = x.float(), grad_y.float()
    rstd = 1.0 / torch.sqrt(_mean_of_squares(x32) + eps)
    normalized = x32 * rstd
    weighted = g32 * weight.float()
    dot = (weighted * normalized).mean(-1, keepdim=True)
    grad_x = (rstd * (weighted - normalized * dot)).to(x.dtype)
    grad_weight = (g32 * normalized).reshape(-1, x.shape[-1]).sum(0)
    return grad_x, grad_weight
