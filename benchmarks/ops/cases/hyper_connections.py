"""mHC maps of DeepSeek-V4-Flash, against vLLM's TileLang kernels where TileLang is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.hyper_connections import hc_head, hc_post, hc_pre
from consistent_kernels.hyper_connections.spec import IMPLEMENTATIONS

OP = "hyper_connections"
_STREAMS = 4
_NUMBERS = {"norm_eps": 1e-6, "eps": 1e-6}
_ITERATIONS = 20
_REASON = (
    "K is cut at the same columns for any number of tokens, and fn keeps its fp32 bits as three "
    "bf16 terms; stock splits K by the batch and multiplies in TF32"
)
_NO_STOCK = "stock's mHC kernels are TileLang's, which is not installed here"


def cases(setting: Setting) -> Iterator[Case]:
    """One site of a layer: pre and post; and the head behind the last layer."""
    hidden = 96 if setting.small else 4096
    rows = setting.rows()
    x = setting.hazards(max(rows), _STREAMS, hidden, seed=1)
    y = setting.hazards(max(rows), hidden, seed=2)
    maps = _parameters(setting, hidden, (2 + _STREAMS) * _STREAMS, 3)
    head = _parameters(setting, hidden, _STREAMS, 1)
    for impl in setting.implementations(IMPLEMENTATIONS):
        pre = functools.partial(_pre, x, maps, impl)
        _, post, comb = pre(slice(0, max(rows)))
        runs: dict[str, Callable[[slice], Any]] = {
            "hc_pre": pre,
            "hc_post": functools.partial(_post, y, x, post, comb, impl),
            "hc_head": functools.partial(_head, x, head, impl),
        }
        for name, run in runs.items():
            relations = functools.partial(check_rows, run, max(rows))
            for m in rows:
                stock = {
                    "hc_pre": functools.partial(_stock_pre, x[:m], maps),
                    "hc_post": functools.partial(_stock_post, y[:m], x[:m], post[:m], comb[:m]),
                    "hc_head": functools.partial(_stock_head, x[:m], head),
                }[name]
                yield Case(
                    op=name,
                    shape=f"M={m} S={_STREAMS} H={hidden}",
                    impl=impl,
                    ours=functools.partial(run, slice(0, m)),
                    stock=stock if _has_stock(setting) else None,
                    relations=relations,
                    reason=_REASON if _has_stock(setting) else _NO_STOCK,
                )


def _has_stock(setting: Setting) -> bool:
    return setting.device == "cuda" and importlib.util.find_spec("tilelang") is not None


def _parameters(
    setting: Setting, hidden: int, columns: int, scales: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fp32 = torch.float32
    return (
        setting.normal(columns, _STREAMS * hidden, seed=3, scale=0.02, dtype=fp32),
        setting.normal(scales, seed=4, dtype=fp32),
        setting.normal(columns, seed=5, dtype=fp32),
    )


def _pre(
    x: torch.Tensor, maps: tuple[torch.Tensor, ...], impl: str, rows: slice
) -> tuple[torch.Tensor, ...]:
    return hc_pre(x[rows], *maps, **_NUMBERS, iterations=_ITERATIONS, impl=impl)


def _post(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    impl: str,
    rows: slice,
) -> torch.Tensor:
    return hc_post(y[rows], x[rows], post[rows], comb[rows], impl=impl)


def _head(x: torch.Tensor, head: tuple[torch.Tensor, ...], impl: str, rows: slice) -> torch.Tensor:
    return hc_head(x[rows], *head, **_NUMBERS, impl=impl)


def _stock_pre(x: torch.Tensor, maps: tuple[torch.Tensor, ...]) -> Any:
    from vllm.model_executor.kernels.mhc.tilelang import mhc_pre_tilelang

    return mhc_pre_tilelang(x, *maps, 1e-6, 1e-6, 1e-6, 2.0, _ITERATIONS)


def _stock_post(y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> Any:
    from vllm.model_executor.kernels.mhc.tilelang import mhc_post_tilelang

    return mhc_post_tilelang(y, x, post.unsqueeze(-1), comb)


def _stock_head(x: torch.Tensor, head: tuple[torch.Tensor, ...]) -> Any:
    from vllm.model_executor.kernels.mhc.tilelang import hc_head_fused_kernel_tilelang

    return hc_head_fused_kernel_tilelang(x, *head, 1e-6, 1e-6)
