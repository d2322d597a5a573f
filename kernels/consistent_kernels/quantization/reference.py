"""FP8 quantization in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import torch

from consistent_kernels.quantization.spec import (
    FP8_MAX,
    FP8_NAN,
    GROUP,
    MIN_AMAX,
    MIN_UE8M0_SCALE,
)


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    # On CUDA, dividing by a Python number multiplies by its reciprocal.
    return torch.full((), value, dtype=torch.float32, device=like.device)


def scale_of(amax: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return the scale of groups with these fp32 maxima of magnitudes; NaN where not finite."""
    scale = amax.clamp_min(MIN_AMAX) / _constant(FP8_MAX, amax)
    if scale_format == "ue8m0":
        bits = scale.clamp_min(MIN_UE8M0_SCALE).view(torch.int32)
        exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0).int()
        scale = (exponent << 23).view(torch.float32)
    return torch.where(amax.isfinite(), scale, _constant(float("nan"), amax))


def _to_fp8(scaled: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    values = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    # The cast of a NaN keeps its sign on CPU.
    values.view(torch.uint8).masked_fill_(~finite, FP8_NAN)
    return values


def quantize_rows_ref(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round(clamp(x / s)) with one s per row and 128 columns.

    Args:
        x: [M, K], bf16, fp16 or fp32.
        scale_format: "fp32" or "ue8m0" (a power of two).

    Returns:
        (q [M, K] float8_e4m3fn contiguous, s [M, ceil(K / 128)] fp32).
    """
    rows, columns = x.shape
    groups = -(-columns // GROUP)
    if columns == groups * GROUP:
        x32 = x.float()
    else:
        x32 = torch.zeros((rows, groups * GROUP), device=x.device, dtype=torch.float32)
        x32[:, :columns] = x
    grouped = x32.reshape(rows, groups, GROUP)
    amax = grouped.abs().amax(-1)
    scale = scale_of(amax, scale_format)
    finite = amax.isfinite()[:, :, None]
    values = _to_fp8(grouped / scale[:, :, None], finite).view(rows, groups * GROUP)
    return values[:, :columns].contiguous(), scale


def quantize_blocks_ref(
    weight: torch.Tensor, scale_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round(clamp(w * (1 / s))) with one s per 128 x 128 block.

    Args:
        weight: [N, K], bf16, fp16 or fp32.
        scale_format: "fp32" or "ue8m0".

    Returns:
        (q [N, K] float8_e4m3fn contiguous, s [ceil(N / 128), ceil(K / 128)] fp32).
    """
    rows, columns = weight.shape
    down, across = -(-rows // GROUP), -(-columns // GROUP)
    padded = torch.zeros((down * GROUP, across * GROUP), device=weight.device, dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(down, GROUP, across, GROUP)
    amax = blocks.abs().amax((1, 3))
    scale = scale_of(amax, scale_format)
    inverse = (_constant(1.0, scale) / scale)[:, None, :, None]
    finite = amax.isfinite()[:, None, :, None]
    values = _to_fp8(blocks * inverse, finite).view(down * GROUP, across * GROUP)
    return values[:rows, :columns].contiguous(), scale


def dequantize_rows_ref(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return q * s in fp32, one rounding a value (none for power-of-two scales).

    Args:
        values: [M, K]; scale: [M, ceil(K / 128)].
    """
    spread = scale.repeat_interleave(GROUP, 1)[:, : values.shape[1]]
    return values.float() * spread


def dequantize_blocks_ref(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return q * s in fp32, one rounding a value.

    Args:
        values: [N, K]; scale: [ceil(N / 128), ceil(K / 128)].
    """
    return dequantize_rows_ref(values, scale.repeat_interleave(GROUP, 0)[: values.shape[0]])
