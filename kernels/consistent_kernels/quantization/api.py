"""Public quantization: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda
from consistent_kernels.errors import UnsupportedError, invalid, require_implementation
from consistent_kernels.quantization.layout import tma_aligned_scales
from consistent_kernels.quantization.reference import (
    dequantize_blocks_ref,
    dequantize_rows_ref,
    quantize_blocks_ref,
    quantize_rows_ref,
)
from consistent_kernels.quantization.spec import GROUP, IMPLEMENTATIONS, SCALE_FORMATS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "quantize_rows(Tensor x, str scale_format, bool tma_aligned, str impl) -> (Tensor, Tensor)"
)
_LIBRARY.define("quantize_blocks(Tensor weight, str scale_format, str impl) -> (Tensor, Tensor)")


def _validate(op: str, arg: str, x: torch.Tensor, scale_format: str, impl: str) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if x.dim() != 2 or x.dtype not in _DTYPES:
        raise invalid(op, arg, "2-D bfloat16, float16 or float32", f"{x.dim()}-D {x.dtype}")
    if x.shape[1] == 0:
        raise invalid(op, arg, "of at least one column", tuple(x.shape))
    if scale_format not in SCALE_FORMATS:
        raise UnsupportedError(op, f"scale_format {scale_format!r}", SCALE_FORMATS)


def _quantize_rows(
    x: torch.Tensor, scale_format: str, tma_aligned: bool, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    count("quantize_rows", impl)
    if impl == "reference":
        values, scale = quantize_rows_ref(x, scale_format)
        return values, tma_aligned_scales(scale) if tma_aligned else scale
    require_cuda("quantize_rows", impl, x)
    from consistent_kernels.quantization.triton import quantize_rows_fwd

    return quantize_rows_fwd(x, scale_format, tma_aligned)


def _quantize_blocks(
    weight: torch.Tensor, scale_format: str, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    count("quantize_blocks", impl)
    if impl == "reference":
        return quantize_blocks_ref(weight, scale_format)
    require_cuda("quantize_blocks", impl, weight)
    from consistent_kernels.quantization.triton import quantize_blocks_fwd

    return quantize_blocks_fwd(weight, scale_format)


_LIBRARY.impl("quantize_rows", _quantize_rows, "CompositeExplicitAutograd")
_LIBRARY.impl("quantize_blocks", _quantize_blocks, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::quantize_rows", lib=_LIBRARY)
def _(
    x: torch.Tensor, scale_format: str, tma_aligned: bool, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    groups = (columns + GROUP - 1) // GROUP
    values = x.new_empty((rows, columns), dtype=torch.float8_e4m3fn)
    if not tma_aligned:
        return values, x.new_empty((rows, groups), dtype=torch.float32)
    strides = (1, (rows + 3) // 4 * 4)
    return values, x.new_empty_strided((rows, groups), strides, dtype=torch.float32)


@torch.library.register_fake("consistent_kernels::quantize_blocks", lib=_LIBRARY)
def _(weight: torch.Tensor, scale_format: str, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    shape = ((rows + GROUP - 1) // GROUP, (columns + GROUP - 1) // GROUP)
    values = weight.new_empty((rows, columns), dtype=torch.float8_e4m3fn)
    return values, weight.new_empty(shape, dtype=torch.float32)


def quantize_rows(
    x: torch.Tensor, *, scale_format: str, impl: str, tma_aligned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round(clamp(x / s, -448, 448)), s = max(amax, 1e-10) / 448 of 128 columns of a row.

    With "ue8m0" s is rounded up to a power of two first. Source: vLLM's
    `per_token_group_fp8_quant` (csrc/quantization/w8a8/fp8/per_token_group_quant.cu), the same bits
    for finite bf16; a group that holds NaN or infinity becomes NaN here as a whole.

    Args:
        x: [M, K], bf16, fp16 or fp32; rows may be strided. K need not be a multiple of 128.
        scale_format: "fp32" or "ue8m0"; the scales are fp32 numbers in both.
        impl: "reference" (any device) or "triton" (CUDA); the same bits.
        tma_aligned: write the scales column-major and 16-byte aligned, as DeepGEMM reads them.

    Returns:
        (q [M, K] float8_e4m3fn contiguous, s [M, ceil(K / 128)] fp32). x is about q * s.

    Numerics:
        A row's bits depend on that row alone.

    Raises:
        InvalidInputError: shape or dtype.
        UnsupportedError: unknown impl or scale_format.
    """
    _validate("quantize_rows", "x", x, scale_format, impl)
    return torch.ops.consistent_kernels.quantize_rows(x, scale_format, tma_aligned, impl)


def quantize_blocks(
    weight: torch.Tensor, *, scale_format: str, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round(clamp(w * (1 / s), -448, 448)), s = max(amax, 1e-10) / 448 of a 128 x 128 block.

    Source: verl's `scaled_fp8_blockwise` and DeepGEMM's `per_block_cast_to_fp8`, with IEEE
    divisions; docs/numerics.md says where the bits differ from theirs.

    Args:
        weight: [N, K], bf16, fp16 or fp32; neither N nor K need be a multiple of 128.
        scale_format: "fp32" or "ue8m0".
        impl: "reference" (any device) or "triton" (CUDA); the same bits.

    Returns:
        (q [N, K] float8_e4m3fn contiguous, s [ceil(N / 128), ceil(K / 128)] fp32).

    Raises:
        InvalidInputError: shape or dtype.
        UnsupportedError: unknown impl or scale_format.
    """
    _validate("quantize_blocks", "weight", weight, scale_format, impl)
    return torch.ops.consistent_kernels.quantize_blocks(weight, scale_format, impl)


def quantize_weight(
    master: torch.Tensor,
    *,
    scale_format: str,
    impl: str,
    model_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a master weight: the one function that trainer and engine both call.

    The master is rounded to the model dtype first (what the trainer sends and the engine holds), so
    an fp32 master and its bf16 copy give the same bits.

    Args:
        master: [N, K], fp32 or the model dtype.
        scale_format, impl: as in `quantize_blocks`.
        model_dtype: bf16, fp16 or fp32.

    Returns:
        (q [N, K] float8_e4m3fn, s [ceil(N / 128), ceil(K / 128)] fp32). They do not follow later
        changes of `master`.

    Raises:
        InvalidInputError: shape or dtype.
        UnsupportedError: unknown impl or scale_format.
    """
    # FP8 values would be taken for a master without their scales.
    _validate("quantize_weight", "master", master, scale_format, impl)
    if model_dtype not in _DTYPES:
        raise UnsupportedError("quantize_weight", f"model_dtype {model_dtype}", _DTYPES)
    rounded = master.detach().to(model_dtype)
    return quantize_blocks(rounded, scale_format=scale_format, impl=impl)


def dequantize_rows(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return q * s [M, K] in fp32, then rounded to `dtype`; s: [M, ceil(K / 128)]."""
    _check_pair("dequantize_rows", values, scale, 1, dtype)
    return dequantize_rows_ref(values, scale).to(dtype)


def dequantize_blocks(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return q * s [N, K] in fp32, then rounded to `dtype`; s: [ceil(N / 128), ceil(K / 128)]."""
    _check_pair("dequantize_blocks", values, scale, GROUP, dtype)
    return dequantize_blocks_ref(values, scale).to(dtype)


def _check_pair(
    op: str, values: torch.Tensor, scale: torch.Tensor, group_rows: int, dtype: torch.dtype
) -> None:
    if values.dim() != 2 or values.dtype != torch.float8_e4m3fn:
        raise invalid(op, "values", "2-D float8_e4m3fn", f"{values.dim()}-D {values.dtype}")
    shape = (-(-values.shape[0] // group_rows), -(-values.shape[1] // GROUP))
    if scale.dtype != torch.float32 or tuple(scale.shape) != shape:
        raise invalid(
            op, "scale", f"float32 of shape {shape}", f"{scale.dtype} of shape {tuple(scale.shape)}"
        )
    if scale.device != values.device:
        raise invalid(op, "scale", f"on {values.device}", scale.device)
    if dtype not in _DTYPES:
        raise UnsupportedError(op, f"dtype {dtype}", _DTYPES)
