"""Gradients of sparse attention in plain PyTorch, fp32, on any device."""

from __future__ import annotations

import torch

from consistent_kernels.sparse_attention.reference import gather_entries, tokens_per_chunk


def lse_with_sink(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return log(row sum + sink), [T, H], +inf for a row that names no entry (all P are 0)."""
    return lse if sinks is None else torch.logaddexp(lse, sinks.expand_as(lse))


def delta_of(grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return sum(grad_out * out), [T, H] fp32; 0 for a query that names nothing (lse +inf).

    Its gradient may be padding's, which holds anything.
    """
    delta = (grad_out.float() * out.float()).sum(-1)
    return torch.where(lse == float("inf"), 0.0, delta)


def grad_of_sinks(
    delta: torch.Tensor, total: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor | None:
    """The sink's value is zero, so its score has the gradient P_sink (0 - delta); [H] fp32."""
    if sinks is None:
        return None
    return (-(sinks - total).exp() * delta).sum(0)


def sparse_attention_bwd_ref(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """With P = exp(scale q k^T - lse'), lse' with the sink, and delta = sum(grad_out * out):

    dS = scale P (grad_out v^T - delta); grad_q = dS k; grad of an entry = dS^T q + P^T grad_out on
    its first d_v columns, added over the (query, column) pairs that name it, ascending. The
    rounding of P is passed straight through.

    Returns:
        (grad_q in the dtype of q, grad_kv [S, D] in the dtype of kv, grad_sinks [H] fp32 or None).
    """
    d_v = out.shape[-1]
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_kv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    delta = delta_of(grad_out, out, lse)
    total = lse_with_sink(lse, sinks)
    step = tokens_per_chunk(max(1, indices.shape[1]), kv.shape[1])
    for begin in range(0, q.shape[0], step):
        part = slice(begin, begin + step)
        entries, valid = gather_entries(kv, indices[part])
        unnamed = (lse[part] == float("inf")).unsqueeze(-1)
        q32, g32 = q[part].float(), grad_out[part].float().masked_fill(unnamed, 0.0)
        p = torch.bmm(q32, entries.transpose(1, 2)).mul_(scale).sub_(total[part].unsqueeze(-1))
        p = p.exp_().masked_fill_(~valid.unsqueeze(1), 0.0)
        ds = torch.bmm(g32, entries[..., :d_v].transpose(1, 2)).sub_(delta[part].unsqueeze(-1))
        ds = ds.mul_(p).mul_(scale)
        grad_q[part] = torch.bmm(ds, entries).to(q.dtype)
        grad_entries = torch.bmm(ds.transpose(1, 2), q32)
        grad_entries[..., :d_v] += torch.bmm(p.transpose(1, 2), g32)
        named = valid.reshape(-1).nonzero().view(-1)
        rows = indices[part].reshape(-1).index_select(0, named).long()
        grad_kv.index_add_(0, rows, grad_entries.flatten(0, 1).index_select(0, named))
    return grad_q, grad_kv.to(kv.dtype), grad_of_sinks(delta, total, sinks)
