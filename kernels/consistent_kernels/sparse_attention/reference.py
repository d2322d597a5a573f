"""Sparse attention in plain PyTorch: the readable form of the spec, and the CPU program.

Every GEMM has the shape [H, D] x [D, 64] or [H, 64] x [64, d_v], so a query's bits cannot depend on
the other queries or on how many columns of indices there are.
"""

from __future__ import annotations

import torch

from consistent_kernels.cpu_gemm import plain_gemms
from consistent_kernels.sparse_attention.spec import ENTRY_TILE
from consistent_kernels.tree import halving_sum

LOWEST = torch.finfo(torch.float32).min
"""Running maximum before the first entry: finite, so that no inf - inf arises."""

CHUNK_BYTES = 64 << 20
"""Gathered entries held at once."""


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with plain_gemms():
        # MKL threads a lone matrix from inside, with other kernels: a batch has at least two.
        if a.shape[0] == 1:
            return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
        return torch.bmm(a, b)


def padded_indices(indices: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return indices [T, K] with -1 columns up to a multiple (and at least one multiple)."""
    width = indices.shape[1]
    target = max(multiple, -(-width // multiple) * multiple)
    if target == width:
        return indices
    return torch.nn.functional.pad(indices, (0, target - width), value=-1)


def gather_entries(kv: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (entries [n, K, D] fp32 with zeros where an index is -1, valid [n, K])."""
    valid = indices >= 0
    if len(kv) == 0:  # then every index is -1
        kv = kv.new_zeros((1, kv.shape[1]))
    rows = indices.clamp_min(0).reshape(-1).long()
    entries = kv.index_select(0, rows).float().view(*indices.shape, kv.shape[1])
    return entries.masked_fill_(~valid.unsqueeze(-1), 0.0), valid


def tokens_per_chunk(width: int, columns: int) -> int:
    """Return how many queries' entries of `width` indices and `columns` fp32 columns fit."""
    return max(1, CHUNK_BYTES // (4 * width * columns))


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, width = q.shape
    tiles = indices.shape[1] // ENTRY_TILE
    entries, valid = gather_entries(kv, indices)
    entries = entries.view(tokens * tiles, ENTRY_TILE, width)
    queries = q.float().unsqueeze(1).expand(-1, tiles, -1, -1).reshape(-1, heads, width)
    scores = _bmm(queries, entries.transpose(1, 2)).view(tokens, tiles, heads, ENTRY_TILE)
    hidden = ~valid.view(tokens, tiles, 1, ENTRY_TILE)
    scores.mul_(scale).masked_fill_(hidden, float("-inf"))
    peak = scores.amax(-1).clamp_min_(LOWEST).cummax(1).values
    p = scores.sub_(peak.unsqueeze(-1)).exp_()
    sums = halving_sum(p)
    rounded = p.to(kv.dtype).float().view(-1, heads, ENTRY_TILE)
    weighted = _bmm(rounded, entries[..., :d_v]).view(tokens, tiles, heads, d_v)
    total, acc = sums[:, 0], weighted[:, 0]
    for tile in range(1, tiles):
        rescale = (peak[:, tile - 1] - peak[:, tile]).exp_()
        total = total * rescale + sums[:, tile]
        acc = acc * rescale.unsqueeze(-1) + weighted[:, tile]
    m = peak[:, -1]
    divisor = total if sinks is None else total + (sinks - m).exp_()
    seen = total > 0
    # + 0.0: the sign of an exact zero would follow columns that name nothing.
    out = acc.div_(torch.where(seen, divisor, 1.0).unsqueeze(-1)).add_(0.0)
    return out, torch.where(seen, m + total.log(), float("inf"))


def sparse_attention_ref(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax over the named entries and the sink of scale q kv^T, times the entries' values.

    Args:
        q: [T, H, D]; kv: [S, D]; indices: [T, K] int32, rows of kv or -1.
        sinks: [H] fp32 or None; d_v: leading columns of kv that are the value.

    Returns:
        (out [T, H, d_v] in the dtype of q, lse [T, H] fp32).
    """
    tokens, heads, _ = q.shape
    out = torch.empty((tokens, heads, d_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    padded = padded_indices(indices, ENTRY_TILE)
    step = tokens_per_chunk(padded.shape[1], q.shape[2])
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        acc, sums = _attend(q[part], kv, padded[part], sinks, scale, d_v)
        out[part], lse[part] = acc.to(q.dtype), sums
    return out, lse
