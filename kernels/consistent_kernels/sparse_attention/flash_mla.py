"""Sparse attention by FlashMLA's sparse prefill kernel, from the binary that vLLM ships.

One kernel serves prefill, decode and training: it has no splits that follow the batch (FlashMLA's
decode kernels do; deepseek-ai/FlashMLA issue 212).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from consistent_kernels.devices import require_cuda
from consistent_kernels.errors import UnsupportedError, invalid
from consistent_kernels.sparse_attention.reference import padded_indices
from consistent_kernels.sparse_attention.spec import FLASH_MLA_ENTRIES, FLASH_MLA_HEADS

_VALUE_WIDTH = 512
_WIDTHS = (512, 576)
_ARGUMENTS = 8
"""(q, kv, indices, scale, d_v, sinks, lengths, out); older binaries take a shorter list."""


@functools.cache
def _kernel() -> tuple[Any, int]:
    from consistent_kernels.vendored import flash_mla

    op = flash_mla().sparse_prefill_fwd
    count = len(op.default._schema.arguments)
    if not 5 <= count <= _ARGUMENTS:
        raise UnsupportedError("sparse_attention", f"FlashMLA with {count} arguments", ["5 to 8"])
    return op, count


def _check(q: torch.Tensor, kv: torch.Tensor, d_v: int) -> None:
    if q.dtype != torch.bfloat16 or kv.dtype != torch.bfloat16:
        raise invalid("sparse_attention", "q and kv", "bfloat16 for impl 'flash_mla'", q.dtype)
    if q.shape[2] not in _WIDTHS or d_v != _VALUE_WIDTH:
        raise UnsupportedError(
            "sparse_attention",
            f"width {q.shape[2]} with d_v {d_v} by impl 'flash_mla'",
            [f"width {width} with d_v {_VALUE_WIDTH}" for width in _WIDTHS],
        )
    if q.shape[1] > max(FLASH_MLA_HEADS):
        raise UnsupportedError(
            "sparse_attention", f"{q.shape[1]} heads", [f"at most {max(FLASH_MLA_HEADS)}"]
        )


def _padded_heads(x: torch.Tensor, dim: int, value: float) -> torch.Tensor:
    heads = x.shape[dim]
    target = next(count for count in FLASH_MLA_HEADS if count >= heads)
    if target == heads:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = target - heads
    return torch.cat((x, x.new_full(shape, value)), dim=dim)


def sparse_attention_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    d_v: int,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call FlashMLA; see `sparse_attention`."""
    _check(q, kv, d_v)
    require_cuda("sparse_attention", "flash_mla", q)
    tokens, heads, _ = q.shape
    if tokens == 0:
        return q.new_empty((0, heads, d_v)), q.new_empty((0, heads), dtype=torch.float32)
    op, count = _kernel()
    if sinks is not None and count < 6:
        raise UnsupportedError("sparse_attention", "sinks by this FlashMLA binary", ["no sinks"])
    padded_q = _padded_heads(q, 1, 0.0)
    padded_sinks = None if sinks is None else _padded_heads(sinks, 0, float("-inf"))
    columns = padded_indices(indices, FLASH_MLA_ENTRIES).unsqueeze(1)
    rows = kv.contiguous().unsqueeze(1)
    whole = heads == padded_q.shape[1] and count == _ARGUMENTS
    written = out if whole else None
    arguments = (padded_q, rows, columns, scale, d_v, padded_sinks, None, written)
    result, _, lse = op(*arguments[:count])[:3]
    result, lse = result[:, :heads].contiguous(), lse[:, :heads].contiguous()
    if out is None:
        return result, lse
    if written is None:
        out.copy_(result)
    return out, lse
