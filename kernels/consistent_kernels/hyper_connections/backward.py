"""Gradients of the hyper-connection maps, by hand, in fp32, on any device."""

from __future__ import annotations

import torch

from consistent_kernels.hyper_connections.reference import (
    Mixes,
    _scale_columns,
    _sigmoid,
    mixes_ref,
    sinkhorn_ref,
)


def _mixes_bwd(
    grad_logits: torch.Tensor,
    mixes: Mixes,
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """With m = raw rstd and l = m scale + base, and d rstd / dx = -rstd^3 x / K:

    grad_raw = grad_l scale rstd; grad_x = grad_raw fn - x rstd^2 / K sum_j(grad_l scale m)_j.

    Returns:
        (grad_x [T, S, H] fp32, grad_fn, grad_scale, grad_base), all fp32.
    """
    flat = x.flatten(1).float()
    columns = _scale_columns(scale, x.shape[1])
    normalized = mixes.raw * mixes.rstd
    grad_base = grad_logits.sum(0)
    per_column = (grad_logits * normalized).sum(0)
    streams = x.shape[1]
    parts = per_column.split([streams, streams, streams * streams][: scale.shape[0]])
    grad_scale = torch.stack([part.sum() for part in parts])
    grad_normalized = grad_logits * columns
    grad_raw = grad_normalized * mixes.rstd
    dot = (grad_normalized * normalized).sum(1, keepdim=True)
    grad_x = grad_raw @ fn - flat * (mixes.rstd * mixes.rstd * dot / flat.shape[1])
    return grad_x.view(x.shape), grad_raw.t() @ flat, grad_scale, grad_base


def _sinkhorn_bwd(
    grad_comb: torch.Tensor, steps: list[tuple[torch.Tensor, torch.Tensor, int]]
) -> torch.Tensor:
    """Walk the steps back: c = a / (sum(a) + eps) has grad_a = (g - sum(g c)) / (sum(a) + eps)."""
    grad = grad_comb
    for result, divisor, dim in reversed(steps[1:]):
        grad = (grad - (grad * result).sum(dim, keepdim=True)) / divisor
    softmax, _, dim = steps[0]
    return softmax * (grad - (grad * softmax).sum(dim, keepdim=True))


def _collapse_bwd(
    grad: torch.Tensor, pre: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of sum_i pre_i x_i: (grad_pre [T, S], grad_x [T, S, H])."""
    g32 = grad.float().unsqueeze(1)
    return (g32 * x.float()).sum(-1), g32 * pre.unsqueeze(-1)


def hc_pre_bwd_ref(
    grad_input: torch.Tensor,
    grad_post: torch.Tensor,
    grad_comb: torch.Tensor,
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    post_multiplier: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `hc_pre`.

    Returns:
        (grad_x [T, S, H] in the dtype of x, grad_fn, grad_scale, grad_base in fp32).
    """
    streams = x.shape[1]
    mixes = mixes_ref(x, fn, scale, base, norm_eps)
    logits = mixes.logits
    gate = _sigmoid(logits[:, :streams])
    placed = _sigmoid(logits[:, streams : 2 * streams])
    _, steps = sinkhorn_ref(logits[:, 2 * streams :].unflatten(1, (streams, -1)), eps, iterations)
    grad_pre, grad_x = _collapse_bwd(grad_input, gate + eps, x)
    grad_logits = torch.cat(
        (
            grad_pre * gate * (1.0 - gate),
            grad_post.float() * post_multiplier * placed * (1.0 - placed),
            _sinkhorn_bwd(grad_comb.float(), steps).flatten(1),
        ),
        dim=1,
    )
    through, grad_fn, grad_scale, grad_base = _mixes_bwd(grad_logits, mixes, x, fn, scale)
    return (grad_x + through).to(x.dtype), grad_fn, grad_scale, grad_base


def hc_head_bwd_ref(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `hc_head`: as `hc_pre_bwd_ref` without post and comb."""
    mixes = mixes_ref(x, fn, scale, base, norm_eps)
    gate = _sigmoid(mixes.logits)
    grad_pre, grad_x = _collapse_bwd(grad_out, gate + eps, x)
    through, grad_fn, grad_scale, grad_base = _mixes_bwd(
        grad_pre * gate * (1.0 - gate), mixes, x, fn, scale
    )
    return (grad_x + through).to(x.dtype), grad_fn, grad_scale, grad_base


def hc_post_bwd_ref(
    grad_out: torch.Tensor,
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `hc_post`.

    Returns:
        (grad_y in the dtype of y, grad_x in the dtype of x, grad_post fp32, grad_comb fp32).
    """
    g32, x32 = grad_out.float(), x.float()
    grad_y = (post.unsqueeze(-1) * g32).sum(1)
    grad_x = torch.einsum("tij,tjh->tih", comb, g32)
    grad_post = (g32 * y.float().unsqueeze(1)).sum(-1)
    grad_comb = torch.einsum("tih,tjh->tij", x32, g32)
    return grad_y.to(y.dtype), grad_x.to(x.dtype), grad_post, grad_comb
