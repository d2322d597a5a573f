"""Linear at the widths of Qwen3-8B, against cuBLAS as stock vLLM calls it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.linear import linear, prepare_weight
from consistent_kernels.linear.deep_gemm_start import GemmShape, prepare
from consistent_kernels.linear.spec import IMPLEMENTATIONS

OP = "linear"
_SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "lm_head": (151936, 4096),
}
_SMALL = {"qkv": (192, 128), "lm_head": (320, 128)}
_REASONS = {
    "triton": "the program for layers that DeepGEMM does not take, with one tile for any rows",
    "deep_gemm": "cuBLAS splits K where few tiles are in work, which follows the batch",
}


def cases(setting: Setting) -> Iterator[Case]:
    """Every projection at every batch size; lm_head with fp32 logits, as the sampler reads them."""
    shapes = _SMALL if setting.small else _SHAPES
    if setting.device == "cuda":
        rows = max(setting.rows())
        wanted = [GemmShape(*shape, rows, name == "lm_head") for name, shape in shapes.items()]
        prepare(wanted, torch.device("cuda", torch.cuda.current_device()))
    for name, (n, k) in shapes.items():
        master = setting.normal(n, k, seed=n, scale=0.05)
        x = setting.hazards(max(setting.rows()), k, seed=k)
        out_dtype = torch.float32 if name == "lm_head" else None
        for impl in setting.implementations(IMPLEMENTATIONS):
            weight = prepare_weight(master, dtype=torch.bfloat16, impl=impl, out_dtype=out_dtype)
            run = functools.partial(_ours, x, weight, impl, out_dtype)
            rows = min(len(x), 512) if name == "lm_head" else len(x)
            relations = functools.partial(check_rows, run, rows)
            for m in setting.rows():
                if name == "lm_head" and m > 256:
                    continue  # an engine computes logits for one row a request
                yield Case(
                    op=OP,
                    shape=f"{name} M={m} N={n} K={k}",
                    impl=impl,
                    ours=functools.partial(run, slice(0, m)),
                    stock=functools.partial(_stock, x[:m], master, out_dtype),
                    relations=relations,
                    reason=_REASONS.get(impl),
                )


def _ours(
    x: torch.Tensor, weight: torch.Tensor, impl: str, dtype: torch.dtype | None, rows: slice
) -> torch.Tensor:
    return linear(x[rows], weight, impl=impl, out_dtype=dtype)


def _stock(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    y = F.linear(x, weight)
    return y if dtype is None else y.to(dtype)
