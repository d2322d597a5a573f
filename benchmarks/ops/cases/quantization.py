"""FP8 quantization of activations and weights at DeepSeek-V3.2's widths, against vLLM's kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.ops.case import Case, Setting
from benchmarks.ops.relations import check_rows
from consistent_kernels.quantization import quantize_rows, quantize_weight
from consistent_kernels.quantization.spec import IMPLEMENTATIONS, SCALE_FORMATS

OP = "quantization"
_WIDTHS = (2048, 7168)
_WEIGHTS = ((7168, 2048), (24576, 1536))
_NO_STOCK = "vLLM has no kernel for it on a CPU"


def cases(setting: Setting) -> Iterator[Case]:
    """Rows at each width, format and batch size; two weights with fp32 scales, as verl sends."""
    for width in (256,) if setting.small else _WIDTHS:
        x = setting.hazards(max(setting.rows()), width, seed=width)
        for impl in setting.implementations(IMPLEMENTATIONS):
            for scale_format in SCALE_FORMATS:
                run = functools.partial(_rows, x, scale_format, impl)
                relations = functools.partial(check_rows, run, len(x))
                for m in setting.rows():
                    yield Case(
                        op="quantize_rows",
                        shape=f"M={m} K={width} {scale_format}",
                        impl=impl,
                        ours=functools.partial(run, slice(0, m)),
                        stock=functools.partial(_stock_rows, x[:m], scale_format)
                        if x.is_cuda
                        else None,
                        relations=relations,
                        reason=None if x.is_cuda else _NO_STOCK,
                    )
    for n, k in ((384, 256),) if setting.small else _WEIGHTS:
        weight = setting.normal(n, k, seed=n, scale=0.05)
        for impl in setting.implementations(IMPLEMENTATIONS):
            quantize = functools.partial(_blocks, weight, impl)
            yield Case(
                op="quantize_weight",
                shape=f"N={n} K={k} fp32",
                impl=impl,
                ours=functools.partial(quantize, slice(0, n)),
                stock=functools.partial(_stock_blocks, weight) if weight.is_cuda else None,
                # Rows of a weight share scales in blocks of 128: parts of whole blocks are equal.
                relations=functools.partial(
                    check_rows, functools.partial(_whole_blocks, quantize), n // 128
                ),
                reason=None if weight.is_cuda else _NO_STOCK,
            )


def _rows(x: torch.Tensor, scale_format: str, impl: str, rows: slice) -> tuple[torch.Tensor, ...]:
    # As DeepGEMM reads it; the reference has the same bits in either layout.
    return quantize_rows(x[rows], scale_format=scale_format, impl=impl, tma_aligned=True)


def _blocks(weight: torch.Tensor, impl: str, rows: slice) -> tuple[torch.Tensor, ...]:
    return quantize_weight(weight[rows], scale_format="fp32", impl=impl)


def _whole_blocks(quantize: functools.partial, blocks: slice) -> tuple[torch.Tensor, ...]:
    values, scale = quantize(slice(blocks.start * 128, blocks.stop * 128))
    return values.view(blocks.stop - blocks.start, 128, -1), scale


def _stock_rows(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, ...]:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return per_token_group_quant_fp8(
        x,
        128,
        column_major_scales=True,
        tma_aligned_scales=True,
        use_ue8m0=scale_format == "ue8m0",
    )


def _stock_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    return per_block_cast_to_fp8(weight)
