"""RMSNorm with and without a residual, and over heads (q/k norm), against vLLM's CUDA kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.rms_norm import add_rms_norm, rms_norm
from consistent_kernels.rms_norm.spec import IMPLEMENTATIONS
from consistent_kernels.testing import norm_weight

OP = "rms_norm"
_EPS = 1e-6
_HEADS = 32


def cases(setting: Setting) -> Iterator[Case]:
    """The norms of a Qwen3-8B layer."""
    hidden, head_dim = (192, 64) if setting.small else (4096, 128)
    rows = setting.rows()
    x = setting.hazards(max(rows), hidden, seed=1)
    residual = setting.hazards(max(rows), hidden, seed=2)
    heads = setting.hazards(max(rows), _HEADS, head_dim, seed=3)
    weight = norm_weight(hidden, seed=4, device=setting.device)
    head_weight = norm_weight(head_dim, seed=5, device=setting.device)
    for impl in setting.implementations(IMPLEMENTATIONS):
        runs: dict[str, Callable[[slice], Any]] = {
            "rms_norm": lambda part, impl=impl: rms_norm(x[part], weight, _EPS, impl=impl),
            "add_rms_norm": lambda part, impl=impl: add_rms_norm(
                x[part], residual[part], weight, _EPS, impl=impl
            ),
            "qk_norm": lambda part, impl=impl: rms_norm(heads[part], head_weight, _EPS, impl=impl),
        }
        shapes = {
            "rms_norm": f"H={hidden}",
            "add_rms_norm": f"H={hidden}",
            "qk_norm": f"heads={_HEADS} D={head_dim}",
        }
        for name, run in runs.items():
            relations = functools.partial(check_rows, run, max(rows))
            for m in rows:
                stock = {
                    "rms_norm": functools.partial(_stock, setting.device, x[:m], weight),
                    "add_rms_norm": functools.partial(
                        _stock_add, setting.device, x[:m].clone(), residual[:m].clone(), weight
                    ),
                    "qk_norm": functools.partial(_stock, setting.device, heads[:m], head_weight),
                }[name]
                yield Case(
                    op=name,
                    shape=f"M={m} {shapes[name]}",
                    impl=impl,
                    ours=functools.partial(run, slice(0, m)),
                    stock=stock,
                    relations=relations,
                )


def _stock(device: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if device == "cpu":
        return torch.nn.functional.rms_norm(x, weight.shape, weight, _EPS)
    from vllm import _custom_ops

    out = torch.empty_like(x)
    _custom_ops.rms_norm(out, x, weight, _EPS)
    return out


def _stock_add(
    device: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    if device == "cpu":
        return torch.nn.functional.rms_norm(x + residual, weight.shape, weight, _EPS)
    from vllm import _custom_ops

    # In place on its own copies, as in the engine; their values do not change the time.
    _custom_ops.fused_add_rms_norm(x, residual, weight, _EPS)
    return x
