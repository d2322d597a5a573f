"""Rotary embedding at the heads of Qwen3-8B, against vLLM's CUDA kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.rotary import RopeParameters, rope_tables, rotary
from consistent_kernels.rotary.spec import IMPLEMENTATIONS

OP = "rotary"


def cases(setting: Setting) -> Iterator[Case]:
    """32 query and 8 key heads of 128."""
    head_dim, q_heads, k_heads = (64, 4, 2) if setting.small else (128, 32, 8)
    rope = RopeParameters(head_dim, head_dim, theta=1e6, max_position=8192)
    rows = max(setting.rows())
    q, k = (
        setting.hazards(rows, q_heads, head_dim, seed=1),
        setting.hazards(rows, k_heads, head_dim, seed=2),
    )
    positions = (torch.arange(rows, device=setting.device) * 7) % rope.max_position
    for impl in setting.implementations(IMPLEMENTATIONS):
        run = functools.partial(_ours, positions, q, k, rope, impl)
        relations = functools.partial(check_rows, run, rows)
        for m in setting.rows():
            yield Case(
                op=OP,
                shape=f"M={m} heads={q_heads}/{k_heads} D={head_dim}",
                impl=impl,
                ours=functools.partial(run, slice(0, m)),
                stock=_stock(setting.device, positions[:m], q[:m].clone(), k[:m].clone(), rope),
                relations=relations,
            )


def _ours(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    rope: RopeParameters,
    impl: str,
    part: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary(positions[part], q[part], k[part], rope=rope, impl=impl)


def _stock(
    device: str, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, rope: RopeParameters
) -> functools.partial[None]:
    cos, sin = rope_tables(rope, device)
    if device == "cpu":
        return functools.partial(_torch, positions, q, k, cos, sin)
    from vllm import _custom_ops

    table = torch.cat((cos, sin), dim=-1).to(q.dtype)
    return functools.partial(
        _custom_ops.rotary_embedding, positions, q.flatten(1), k.flatten(1), rope.head_dim, table,
        True,
    )  # fmt: skip


def _torch(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        torch.cat((first * c - second * s, second * c + first * s), dim=-1)
