"""silu(gate) * up in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch


def silu_and_mul_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """y = round(gate / (1 + exp(-gate)) * up) in fp32 up to the one rounding.

    Args:
        gate, up: [T, I], same dtype; strided rows allowed.

    Returns:
        [T, I] in the dtype of gate.
    """
    g32 = gate.float()
    # Not F.silu: its fp32 bits follow an element's place in memory and the number of threads (the
    # ends of its vector loops use another exp). torch.exp has one form for both.
    y = torch.neg(g32).exp_().add_(1.0)
    return torch.div(g32, y, out=y).mul_(up.float()).to(gate.dtype)


def silu_and_mul_bwd_ref(
    grad_y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """With s = sigmoid(gate): grad_gate = g up s (1 + gate (1 - s)), grad_up = g gate s.

    Args:
        grad_y, gate, up: [T, I].

    Returns:
        (grad_gate, grad_up), dtype of gate, computed in fp32.
    """
    g32, gate32, up32 = grad_y.float(), gate.float(), up.float()
    sigmoid = 1.0 / (1.0 + torch.exp(-gate32))
    grad_gate = g32 * up32 * sigmoid * (1.0 + gate32 * (1.0 - sigmoid))
    return grad_gate.to(gate.dtype), (g32 * gate32 * sigmoid).to(gate.dtype)
