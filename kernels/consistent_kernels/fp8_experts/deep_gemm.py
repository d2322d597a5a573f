"""FP8 experts by DeepGEMM's grouped GEMMs, in the contiguous or the masked layout.

Rows go to aligned places, through the first GEMM, the activation, the second GEMM, and back to
their slots, without waiting for the device. Rows of a tile do not meet, so a row has the bits of
the dense `fp8_gemm_nt` in either layout (H200: shown by the tests).
"""

from __future__ import annotations

import torch

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.experts.deep_gemm_places import AnyPlaces, expert_places
from consistent_kernels.experts.deep_gemm_rows import combine_places, from_places
from consistent_kernels.fp8_experts.deep_gemm_grouped import grouped_gemm, is_masked, is_packed
from consistent_kernels.fp8_experts.deep_gemm_packed import pack_and_quantize
from consistent_kernels.fp8_experts.deep_gemm_rows import (
    PLACED_ROWS,
    Quantized,
    activate_and_quantize,
    place_and_quantize,
    quantize_to_places,
    to_places,
)
from consistent_kernels.fp8_experts.deep_gemm_start import start
from consistent_kernels.fp8_linear.deep_gemm import check_supported
from consistent_kernels.quantization import quantize_rows

FUSED_ROWS = PLACED_ROWS
"""Rows (tokens times slots) up to which a token is quantized once a slot, in one launch; above it
is quantized once and copied. The bytes are the same."""


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
            tokens may have no place left, and the result is NaN.

    Raises:
        UnsupportedError: x is not bf16, or a shape, device or format that DeepGEMM does not serve.
        NumericsError: the start-up probe found that bits follow the batch.
    """
    tokens, slots = ids.shape
    _check(x, w13, w2, scale_format)
    if not tokens:
        return x.new_empty((0, slots, w2.shape[1]))
    weights = (w13, w13_scale), (w2, w2_scale)
    y, places = _outputs_in_places(x, *weights, ids, limit, scale_format, layout)
    return from_places(y, places).view(tokens, slots, -1)


def fp8_experts_deep_gemm(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    limit: float | None,
    scale_format: str,
    layout: str,
) -> torch.Tensor:
    """`combine` of `fp8_expert_outputs_deep_gemm`, read from the places: [T, H].

    Args:
        weights: [T, K] fp32.
        shared: [T, H] bf16, or None; the rest as there.
    """
    _check(x, w13, w2, scale_format)
    if not ids.shape[0]:
        return x.new_empty((0, w2.shape[1]))
    stacked = (w13, w13_scale), (w2, w2_scale)
    y, places = _outputs_in_places(x, *stacked, ids, limit, scale_format, layout)
    return combine_places(y, places, weights, shared)


def _check(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, scale_format: str) -> None:
    if x.dtype != torch.bfloat16:
        raise UnsupportedError("fp8_experts (deep_gemm)", str(x.dtype), ["torch.bfloat16"])
    major = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0
    for weight in (w13, w2):
        check_supported(*weight.shape[1:], x.dtype, scale_format, major)


def _outputs_in_places(
    x: torch.Tensor,
    w13: Quantized,
    w2: Quantized,
    ids: torch.Tensor,
    limit: float | None,
    scale_format: str,
    layout: str,
) -> tuple[torch.Tensor, AnyPlaces]:
    """Return ([places, H], places)."""
    tokens, slots = ids.shape
    for weight, _ in (w13, w2):
        start(*weight.shape, scale_format, weight.device)
    flat = aligned(ids.int().contiguous())
    experts, few = w2[0].shape[0], ids.numel() <= FUSED_ROWS

    if is_packed(layout, ids.numel(), experts, x.device):
        rows, packed = pack_and_quantize(aligned_rows(x), flat, experts, scale_format)
        return _through_both(rows, w13, w2, packed, scale_format, limit), packed
    masked = is_masked(layout, tokens, slots, experts)
    if masked and few:
        rows, places = place_and_quantize(aligned_rows(x), flat, experts, scale_format)
        return _through_both(rows, w13, w2, places, scale_format, limit), places
    places = expert_places(flat, experts, masked=masked)
    if few:
        rows = quantize_to_places(aligned_rows(x), places, slots, scale_format)
    else:
        values, scale = quantize_rows(x, scale_format=scale_format, impl="triton")
        rows = to_places(values, scale, places, slots)
    return _through_both(rows, w13, w2, places, scale_format, limit), places


def _through_both(
    rows: Quantized,
    w13: Quantized,
    w2: Quantized,
    places: AnyPlaces,
    scale_format: str,
    limit: float | None,
) -> torch.Tensor:
    gate_up = grouped_gemm(rows, w13, places, scale_format)
    hidden = activate_and_quantize(gate_up, places, scale_format, limit)
    return grouped_gemm(hidden, w2, places, scale_format)
