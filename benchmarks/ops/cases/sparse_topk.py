"""Sparse top-k of DeepSeek-V3.2 (k 2048), against the top-k kernels that vLLM's indexer calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.sparse_topk import sparse_topk, sparse_topk_tickets
from consistent_kernels.sparse_topk.spec import IMPLEMENTATIONS

OP = "sparse_topk"
_K = 2048
_SHAPES = ((1, 64, 256), (4096, 32768, 131072))
_SMALL = ((1, 5), (300, 3000))
_REASONS = {
    "triton": "counts keys by comparison in registers, where stock counts digits by shared-memory "
    "atomics, which Triton does not offer; ours defines ties and order",
    "cuda": "counts bins as stock does, then ranks ties and sorts by place; stock does neither",
}
_WORKSPACE_BYTES = 1 << 20  # vLLM's RADIX_TOPK_WORKSPACE_SIZE


def cases(setting: Setting) -> Iterator[Case]:
    """Every batch of full rows, against the decode kernels and against the prefill kernel."""
    batches, lengths = _SMALL if setting.small else _SHAPES
    for columns in lengths:
        for rows in batches:
            scores = setting.normal(rows, columns, seed=columns + rows, dtype=torch.float32)
            starts = torch.zeros(rows, dtype=torch.int32, device=setting.device)
            ends = torch.full_like(starts, columns)
            for impl in setting.implementations(IMPLEMENTATIONS):
                tickets = sparse_topk_tickets(rows, setting.device)
                run = functools.partial(_ours, scores, starts, ends, tickets, impl)
                relations = functools.partial(check_rows, run, rows)
                for kernel, stock in stock_kernels(scores, starts, ends, _K).items():
                    yield Case(
                        op=OP,
                        shape=f"rows={rows} positions={columns} k={_K} stock={kernel}",
                        impl=impl,
                        ours=functools.partial(run, slice(0, rows)),
                        stock=stock,
                        relations=relations,
                        reason=_REASONS.get(impl),
                    )


def _ours(
    scores: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    tickets: torch.Tensor,
    impl: str,
    rows: slice,
) -> torch.Tensor:
    return sparse_topk(scores[rows], starts[rows], ends[rows], _K, impl=impl, tickets=tickets)


def stock_kernels(
    scores: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, k: int
) -> dict[str, Callable[[], Any]]:
    """Return the kernels that vLLM's indexer calls for these rows, by phase.

    vllm/model_executor/layers/sparse_attn_indexer.py; decode's goes by the number of rows.
    """
    rows, columns = scores.shape
    out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    if scores.device.type == "cpu":
        plain = functools.partial(_torch_topk, scores, k)
        return {"decode": plain, "prefill": plain}
    import vllm._custom_ops as ops  # also registers torch.ops._C

    decode = getattr(torch.ops._C, "cooperative_topk" if rows <= 32 else "persistent_topk")
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=scores.device)
    lens = ends[:, None].contiguous()
    prefill = ops.top_k_per_row_prefill
    strides = scores.stride()
    return {
        "decode": functools.partial(decode, scores, lens, out, workspace, k, columns),
        "prefill": functools.partial(prefill, scores, starts, ends, out, rows, *strides, k),
    }


def _torch_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """What a CPU times in their place: vLLM has no such kernel there."""
    best = scores.topk(min(k, scores.shape[1]), dim=1).indices.to(torch.int32)
    return torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-1)
