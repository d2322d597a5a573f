"""Rotary embedding at the heads of Qwen3-8B, alone and behind q/k norm, against vLLM's kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.rotary import RopeParameters, norm_rotary, rope_tables, rotary
from consistent_kernels.rotary.spec import IMPLEMENTATIONS
from consistent_kernels.testing import norm_weight

OP = "rotary"
_EPS = 1e-6


def cases(setting: Setting) -> Iterator[Case]:
    """32 query and 8 key heads of 128; `norm_rotary` does three kernels' work in one launch."""
    head_dim, q_heads, k_heads = (64, 4, 2) if setting.small else (128, 32, 8)
    rope = RopeParameters(head_dim, head_dim, theta=1e6, max_position=8192)
    rows = max(setting.rows())
    q, k = (
        setting.hazards(rows, q_heads, head_dim, seed=1),
        setting.hazards(rows, k_heads, head_dim, seed=2),
    )
    positions = (torch.arange(rows, device=setting.device) * 7) % rope.max_position
    weights = [norm_weight(head_dim, seed=seed, device=setting.device) for seed in (3, 4)]
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
        fused = functools.partial(_ours_with_norms, positions, q, k, weights, rope, impl)
        relations = functools.partial(check_rows, fused, rows)
        for m in setting.rows():
            yield Case(
                op="norm_rotary",
                shape=f"M={m} heads={q_heads}/{k_heads} D={head_dim}",
                impl=impl,
                ours=functools.partial(fused, slice(0, m)),
                stock=_stock(
                    setting.device, positions[:m], q[:m].clone(), k[:m].clone(), rope, weights
                ),
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


def _ours_with_norms(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    weights: list[torch.Tensor],
    rope: RopeParameters,
    impl: str,
    part: slice,
) -> tuple[torch.Tensor, torch.Tensor]:
    return norm_rotary(positions[part], q[part], k[part], *weights, _EPS, rope=rope, impl=impl)


def _stock(
    device: str,
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    rope: RopeParameters,
    weights: list[torch.Tensor] | None = None,
) -> functools.partial[None]:
    """vLLM's kernel in place; behind its two norm kernels where `weights` are given."""
    cos, sin = rope_tables(rope, device)
    if device == "cpu":
        return functools.partial(_torch, positions, q, k, cos, sin, weights)
    table = torch.cat((cos, sin), dim=-1).to(q.dtype)
    return functools.partial(_vllm, positions, q, k, table, weights)


def _vllm(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    table: torch.Tensor,
    weights: list[torch.Tensor] | None,
) -> None:
    from vllm import _custom_ops

    heads = [q, k]
    if weights is not None:
        heads = [torch.empty_like(q), torch.empty_like(k)]
        for out, x, weight in zip(heads, (q, k), weights, strict=True):
            _custom_ops.rms_norm(out, x, weight, _EPS)
    flat = [x.flatten(1) for x in heads]
    _custom_ops.rotary_embedding(positions, *flat, q.shape[-1], table, True)


def _torch(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: list[torch.Tensor] | None,
) -> None:
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    for x, weight in zip((q, k), weights or (None, None), strict=True):
        if weight is not None:
            x = torch.nn.functional.rms_norm(x, weight.shape, weight, _EPS)
        first, second = x.chunk(2, dim=-1)
        torch.cat((first * c - second * s, second * c + first * s), dim=-1)
