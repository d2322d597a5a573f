"""FP8 linear at DeepSeek-V3.2's and Qwen3's widths, against vLLM's DeepGEMM path."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.deep_gemm_start import prepare
from consistent_kernels.fp8_linear import fp8_linear, warm_up
from consistent_kernels.fp8_linear.deep_gemm import Fp8GemmShape
from consistent_kernels.fp8_linear.spec import IMPLEMENTATIONS, quantization_of
from consistent_kernels.quantization import quantize_weight

OP = "fp8_linear"
_SHAPES = ((4096, 4096), (24576, 1536), (7168, 2048), (4096, 12288))
_SCALE_FORMAT = "ue8m0"
"""What stock vLLM uses with DeepGEMM on Hopper, and DeepSeek-V3.2's checkpoints ask for."""

_REASONS = {
    "reference": "vLLM has no kernel for it on a CPU",
    "triton": "the program for shapes that DeepGEMM does not take, with one tile for any M",
    "deep_gemm": None,
}


def cases(setting: Setting) -> Iterator[Case]:
    """Quantization of x and GEMM together, at every batch size."""
    if setting.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        rows = max(setting.rows())
        prepare((Fp8GemmShape(n, k, rows, _SCALE_FORMAT) for n, k in _SHAPES), device)
    for n, k in ((128, 256),) if setting.small else _SHAPES:
        master = setting.normal(n, k, seed=n, scale=0.05)
        x = setting.hazards(max(setting.rows()), k, seed=k)
        for impl in setting.implementations(IMPLEMENTATIONS):
            weight = quantize_weight(master, scale_format=_SCALE_FORMAT, impl=quantization_of(impl))
            warm_up(weight[0], scale_format=_SCALE_FORMAT, impl=impl)
            run = functools.partial(_ours, x, weight, impl)
            relations = functools.partial(check_rows, run, len(x))
            for m in setting.rows():
                yield Case(
                    op=OP,
                    shape=f"M={m} N={n} K={k} {_SCALE_FORMAT}",
                    impl=impl,
                    ours=functools.partial(run, slice(0, m)),
                    stock=functools.partial(_stock, x[:m], weight) if x.is_cuda else None,
                    relations=relations,
                    reason=_REASONS[impl],
                )


def _ours(
    x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor], impl: str, rows: slice
) -> torch.Tensor:
    return fp8_linear(x[rows], *weight, scale_format=_SCALE_FORMAT, impl=impl)


def _stock(x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils.deep_gemm import fp8_gemm_nt

    a = per_token_group_quant_fp8(
        x, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=True
    )
    y = torch.empty((x.shape[0], weight[0].shape[0]), dtype=torch.bfloat16, device=x.device)
    fp8_gemm_nt(a, weight, y, is_deep_gemm_e8m0_used=True)
    return y
