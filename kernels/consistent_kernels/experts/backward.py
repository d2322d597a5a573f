"""Gradients of the experts, expert by expert, through PyTorch's GEMMs with fp32 accumulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from consistent_kernels.experts.reference import expert_slices, gated_activation, sorted_rows

Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B in fp32, on tensor cores where CUDA can keep the accumulators."""
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def gated_activation_bwd(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, limit: float | None
) -> torch.Tensor:
    """Gradients of (gate, up) side by side, [R, 2 I] fp32.

    With s = sigmoid(g) of the clamped values: d gate = grad u s (1 + g (1 - s)), d up = grad g s;
    a clamped value has gradient 0.

    Args:
        grad: [R, I] fp32; gate, up: [R, I].
    """
    g32, u32 = gate.float(), up.float()
    gate_free = up_free = None
    if limit is not None:
        gate_free, up_free = g32 <= limit, u32.abs() <= limit
        g32, u32 = g32.clamp(max=limit), u32.clamp(min=-limit, max=limit)
    sigmoid = torch.sigmoid(g32)
    grad_gate = grad * u32 * sigmoid * (1.0 + g32 * (1.0 - sigmoid))
    grad_up = grad * g32 * sigmoid
    if gate_free is not None and up_free is not None:
        grad_gate, grad_up = grad_gate * gate_free, grad_up * up_free
    return torch.cat([grad_gate, grad_up], dim=1)


@dataclasses.dataclass(frozen=True)
class Multiplied:
    """What the GEMMs of a forward multiplied, where a straight-through gradient is taken.

    Attributes:
        x: [T, H], the tokens as the first GEMM saw them.
        weights: gives (gate and up [2 I, H], down [H, I]) of an expert as its GEMMs saw them.
        hidden: gives what the second GEMM saw of round(silu(gate) * up) [R, I].
        num_experts, width: E and I.
    """

    x: torch.Tensor
    weights: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    hidden: Callable[[torch.Tensor], torch.Tensor]
    num_experts: int
    width: int


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def gradients_at(
    multiplied: Multiplied,
    grad: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    limit: float | None,
    needs: tuple[bool, bool, bool, bool],
) -> Grads:
    """Gradients of x, w13, w2 and the weights, fp32; intermediate results are recomputed.

    Args:
        multiplied: of the forward.
        grad: [T, H] in the model dtype, to which gate, up, y and their gradients are rounded.
        ids, weights: [T, K]; limit, needs: as in `experts_bwd`.
    """
    tokens, slots = ids.shape
    experts, width, columns = multiplied.num_experts, multiplied.width, multiplied.x.shape[1]
    order, counts = sorted_rows(ids, experts)
    token = order // slots
    dtype = grad.dtype
    rows, grad_rows = multiplied.x[token], grad[token].float()
    row_weights = weights.reshape(-1)[order].float()[:, None]
    grad_x = _zeros(grad, tokens * slots, columns) if needs[0] else None
    grad_w13 = _zeros(grad, experts, 2 * width, columns) if needs[1] else None
    grad_w2 = _zeros(grad, experts, grad.shape[1], width) if needs[2] else None
    grad_weights = torch.zeros_like(weights).reshape(-1) if needs[3] else None
    for expert, part in expert_slices(counts):
        gate_up, down = multiplied.weights(expert)
        mine = rows[part]
        gate, up = product(mine, gate_up.t()).to(dtype).chunk(2, dim=1)
        hidden = multiplied.hidden(gated_activation(gate, up, limit))
        if grad_weights is not None:
            y = product(hidden, down.t()).to(dtype).float()
            grad_weights[order[part]] = (grad_rows[part] * y).sum(-1)
        grad_y = (grad_rows[part] * row_weights[part]).to(dtype)
        if grad_w2 is not None:
            grad_w2[expert] = product(grad_y.t(), hidden)
        if grad_x is None and grad_w13 is None:
            continue
        grad_gate_up = gated_activation_bwd(product(grad_y, down), gate, up, limit).to(dtype)
        if grad_w13 is not None:
            grad_w13[expert] = product(grad_gate_up.t(), mine)
        if grad_x is not None:
            grad_x[order[part]] = product(grad_gate_up, gate_up)
    return (
        None if grad_x is None else sum_over_slots(grad_x, slots),
        grad_w13,
        grad_w2,
        None if grad_weights is None else grad_weights.view(tokens, slots),
    )


def experts_bwd_ref(
    grad: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    limit: float | None,
    needs: tuple[bool, bool, bool, bool],
) -> Grads:
    """See `consistent_kernels.experts.api.experts_bwd`; grad_x comes in fp32."""

    def weights_of(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return w13[expert].to(x.dtype), w2[expert].to(x.dtype)

    multiplied = Multiplied(x, weights_of, lambda hidden: hidden, w13.shape[0], w2.shape[2])
    return gradients_at(multiplied, grad, ids, weights, limit, needs)


def sum_over_slots(rows: torch.Tensor, slots: int) -> torch.Tensor:
    """Add the `slots` rows of each token, [T * slots, H] to [T, H], in ascending slot order."""
    per_slot = rows.view(-1, slots, rows.shape[1])
    total = per_slot[:, 0].clone()
    for slot in range(1, slots):
        total += per_slot[:, slot]
    return total
