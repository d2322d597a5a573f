"""Grouped linears of MLA: V3.2's absorbed projections a head and V4's `wo_a`, against torch.bmm."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.deep_gemm_start import prepare
from consistent_kernels.grouped_linear import grouped_linear
from consistent_kernels.grouped_linear.deep_gemm_start import layer_shapes
from consistent_kernels.grouped_linear.spec import IMPLEMENTATIONS

OP = "grouped_linear"
SHAPES = {
    "v32 k_up": (128, 512, 128),
    "v32 v_up": (128, 128, 512),
    "v4 out_a": (8, 1024, 4096),
}
"""Groups, columns out, columns in."""
_FP8 = "vLLM's V4 runs out_a in FP8, which is another arithmetic"
_REASONS = {
    "triton": "tiles of equal bits, by layer and rows. " + _FP8,
    "deep_gemm": _FP8,
}


def cases(setting: Setting) -> Iterator[Case]:
    """A step's tokens through the weights of every group, in bf16."""
    if setting.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        prepare(layer_shapes(SHAPES.values(), max(setting.rows())), device)
    for name, (groups, columns, inner) in SHAPES.items():
        if setting.small:
            groups, columns, inner = 2, 48, 64
        rows = max(setting.rows())
        x = setting.hazards(rows, groups, inner, seed=1)
        weight = setting.normal(groups, columns, inner, seed=2, scale=inner**-0.5)
        for impl in setting.implementations(IMPLEMENTATIONS):
            run = functools.partial(_ours, x, weight, impl)
            relations = functools.partial(check_rows, run, rows)
            for m in setting.rows():
                yield Case(
                    op=OP,
                    shape=f"{name} M={m} G={groups} N={columns} K={inner}",
                    impl=impl,
                    ours=functools.partial(run, slice(0, m)),
                    stock=functools.partial(stock, x[:m], weight),
                    relations=relations,
                    reason=_REASONS.get(impl),
                )


def _ours(x: torch.Tensor, weight: torch.Tensor, impl: str, rows: slice) -> torch.Tensor:
    return grouped_linear(x[rows], weight, impl=impl)


def stock(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As vLLM's MLA multiplies by W_UK and W_UV, into rows of tokens."""
    out = x.new_empty((x.shape[0], weight.shape[0], weight.shape[1]))
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out
