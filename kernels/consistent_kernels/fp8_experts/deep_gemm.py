"""FP8 experts by DeepGEMM's grouped GEMMs, in the contiguous or the masked layout.

Rows go to aligned places, through the first GEMM, the activation, the second GEMM, and back to
their slots, without waiting for the device. Rows of a tile do not meet, so a row has the bits of
the dense `fp8_gemm_nt` in either layout (H200: shown by the tests).
"""

from __future__ import annotations

import torch

from consistent_kernels.alignment import aligned
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.experts.deep_gemm_grouped import is_masked
from consistent_kernels.experts.deep_gemm_places import expert_places
from consistent_kernels.experts.deep_gemm_rows import from_places
from consistent_kernels.fp8_experts.deep_gemm_grouped import grouped_gemm
from consistent_kernels.fp8_experts.deep_gemm_rows import activate_and_quantize, to_places
from consistent_kernels.fp8_experts.deep_gemm_start import start
from consistent_kernels.fp8_linear.deep_gemm import check_supported
from consistent_kernels.quantization import quantize_rows


def fp8_expert_outputs_deep_gemm(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    scale_format: str,
    layout: str = "contiguous",
) -> torch.Tensor:
    """As `consistent_kernels.fp8_experts.fp8_expert_outputs`; slots that go nowhere are zero.

    Args:
        x: [T, H] bf16.
        layout: "masked" and "fastest" want distinct ids of a token: an expert with more rows than
            tokens may have no place left, and the result is NaN. "fastest" is masked for few
            tokens, as in `experts`: one launch, and tiles that fit experts of few rows.

    Raises:
        UnsupportedError: x is not bf16, or a shape, device or format that DeepGEMM does not serve.
        NumericsError: the start-up probe found that bits follow the batch.
    """
    if x.dtype != torch.bfloat16:
        raise UnsupportedError("fp8_experts (deep_gemm)", str(x.dtype), ["torch.bfloat16"])
    major = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0
    for weight in (w13, w2):
        check_supported(*weight.shape[1:], x.dtype, scale_format, major)
    tokens, slots = ids.shape
    columns = w2.shape[1]
    if not tokens:
        return x.new_empty((0, slots, columns))
    for weight in (w13, w2):
        start(*weight.shape, scale_format, weight.device)
    flat = aligned(ids.int().contiguous())
    masked = is_masked(layout, tokens, w2.shape[0])
    places = expert_places(flat, w2.shape[0], masked=masked)
    values, scale = quantize_rows(x, scale_format=scale_format, impl="triton")
    rows = to_places(values, scale, places, slots)
    gate_up = grouped_gemm(rows, (w13, w13_scale), places, scale_format)
    hidden = activate_and_quantize(gate_up, places, scale_format, limit)
    down = grouped_gemm(hidden, (w2, w2_scale), places, scale_format)
    return from_places(down, places).view(tokens, slots, columns)
