"""RMSNorm in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch


def _rstd(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) of fp32 rows, [..., 1].

    An explicit halving tree: the order of a library sum may follow the number of rows. Zero padding
    to a power of two is left out, for adding zero to a square changes nothing.
    """
    size = x.shape[-1]
    half = 1 << (size - 1).bit_length() >> 1
    total = x * x
    if 0 < half < size < 2 * half:
        total[..., : size - half].add_(total[..., half:])
        total = total[..., :half]
        half //= 2
    while half:
        total = total[..., :half] + total[..., half:]
        half //= 2
    # MKL's fp32 root is one unit off for a sixth of all numbers; rounded from fp64 it is exact.
    return total.div_(size).add_(eps).double().sqrt_().float().reciprocal_()


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
    return (x32 * _rstd(x32, eps)).mul_(weight.float()).to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = round(x + residual); returns (rms_norm(s), s)."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_ref(total, weight, eps), total


def rms_norm_bwd_ref(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    grad_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rms_norm, in fp32.

    With n = x * rstd and h = grad_y * w:
    grad_x = rstd * (h - n * mean(h * n)) + grad_sum; grad_weight = sum over rows of grad_y * n.

    Args:
        grad_y: [..., H]; x: [..., H]; weight: [H].
        grad_sum: [..., H], the gradient that reaches x past the norm, or None.

    Returns:
        (grad_x [..., H] in the dtype of x, grad_weight [H] fp32).
    """
    x32, g32 = x.float(), grad_y.float()
    rstd = _rstd(x32, eps)
    normalized = x32 * rstd
    weighted = g32 * weight.float()
    dot = (weighted * normalized).mean(-1, keepdim=True)
    grad_x = rstd * (weighted - normalized * dot)
    if grad_sum is not None:
        grad_x = grad_x + grad_sum.float()
    grad_x = grad_x.to(x.dtype)
    grad_weight = (g32 * normalized).reshape(-1, x.shape[-1]).sum(0)
    return grad_x, grad_weight
