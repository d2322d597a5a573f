"""The experts' layer in fp64 with its rounding points, and the magnitudes of its gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

U, TINY = 2.0**-8, 2.0**-23


def rounded(value: torch.Tensor) -> torch.Tensor:
    """bf16 values in fp64, the gradient straight through."""
    return value + (value.detach().float().bfloat16().double() - value.detach())


def graph(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    limit: float | None,
    seen: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
) -> torch.Tensor:
    """The layer in fp64 with the spec's rounding points, differentiable.

    `seen` is what the down projection multiplies in the place of a hidden row.
    """
    out = torch.zeros_like(x)
    for row, slot in (ids >= 0).nonzero().tolist():
        expert = int(ids[row, slot])
        gate, up = rounded(w13[expert] @ x[row]).chunk(2)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = seen(rounded(gate * torch.sigmoid(gate) * up))
        index = torch.tensor([row], device=x.device)
        out = out.index_add(0, index, weights[row, slot] * rounded(w2[expert] @ hidden)[None])
    return out


def magnitudes(
    grad: torch.Tensor, given: dict[str, torch.Tensor], limit: float | None
) -> dict[str, torch.Tensor]:
    """The gradients' sums with every term's magnitude: what rounding errors are relative to."""
    x, w13, w2 = (given[name].double() for name in ("x", "w13", "w2"))
    ids, weights = given["topk_ids"], given["topk_weights"].double()
    size = {name: torch.zeros_like(given[name].double()) for name in ("x", "w13", "w2")}
    size["topk_weights"] = torch.zeros_like(weights)
    g = grad.double().abs()
    for row, slot in (ids >= 0).nonzero().tolist():
        expert = int(ids[row, slot])
        gate, up = (w13[expert].abs() @ x[row].abs()).chunk(2)
        # |silu(g)| <= |g|, |silu'| <= 1.1; a clamp only makes values smaller.
        hidden = gate * up
        size["topk_weights"][row, slot] = g[row] @ (w2[expert].abs() @ hidden)
        grad_y = weights[row, slot] * g[row]
        size["w2"][expert] += grad_y[:, None] * hidden[None]
        grad_hidden = grad_y @ w2[expert].abs()
        both = torch.cat([1.1 * grad_hidden * up, grad_hidden * gate])
        size["w13"][expert] += both[:, None] * x[row].abs()[None]
        size["x"][row] += both @ w13[expert].abs()
    return size
