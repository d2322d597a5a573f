"""Public FP8 linear: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda
from consistent_kernels.errors import UnsupportedError, invalid, require_implementation
from consistent_kernels.fp8_linear.reference import fp8_gemm_ref, fp8_linear_bwd_ref
from consistent_kernels.fp8_linear.spec import BLOCK_K, IMPLEMENTATIONS, quantization_of
from consistent_kernels.quantization import quantize_rows
from consistent_kernels.quantization.spec import SCALE_FORMATS

_FP8 = torch.float8_e4m3fn
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "fp8_gemm(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, str scale_format, "
    "ScalarType out_dtype, str impl) -> Tensor"
)


def _fp8_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    scale_format: str,
    out_dtype: torch.dtype,
    impl: str,
) -> torch.Tensor:
    count("fp8_gemm", impl)
    if impl == "reference":
        return fp8_gemm_ref(x, x_scale, weight, weight_scale, out_dtype)
    require_cuda("fp8_gemm", impl, x)
    if impl == "triton":
        from consistent_kernels.fp8_linear.triton import fp8_gemm_fwd

        return fp8_gemm_fwd(x, x_scale, weight, weight_scale, out_dtype)
    from consistent_kernels.fp8_linear.deep_gemm import fp8_gemm_deep_gemm

    return fp8_gemm_deep_gemm(x, x_scale, weight, weight_scale, out_dtype, scale_format)


_LIBRARY.impl("fp8_gemm", _fp8_gemm, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::fp8_gemm", lib=_LIBRARY)
def _(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    scale_format: str,
    out_dtype: torch.dtype,
    impl: str,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def _check_weight(op: str, weight: torch.Tensor, scale: torch.Tensor, inner: int) -> None:
    if weight.dim() != 2 or weight.dtype != _FP8 or weight.shape[1] != inner:
        raise invalid(
            op,
            "weight",
            f"{_FP8} of shape (N, {inner})",
            f"{weight.dtype} of shape {tuple(weight.shape)}",
            "Quantize it with quantize_weight",
        )
    shape = (-(-weight.shape[0] // BLOCK_K), -(-inner // BLOCK_K))
    if scale.dtype != torch.float32 or tuple(scale.shape) != shape:
        raise invalid(
            op,
            "weight_scale",
            f"float32 of shape {shape}",
            f"{scale.dtype} of shape {tuple(scale.shape)}",
        )
    for name, tensor in (("weight", weight), ("weight_scale", scale)):
        if not tensor.is_contiguous():
            raise invalid(op, name, "contiguous", f"strides {tensor.stride()}")
    if scale.device != weight.device:
        raise invalid(op, "weight_scale", f"on {weight.device}", scale.device)


def _check_rows(op: str, x: torch.Tensor, x_scale: torch.Tensor) -> None:
    if x.dim() != 2 or x.dtype != _FP8 or not x.is_contiguous():
        given = f"{x.dim()}-D {x.dtype} of strides {x.stride()}"
        raise invalid(op, "x", f"2-D contiguous {_FP8}", given, "Quantize it with quantize_rows")
    shape = (x.shape[0], -(-x.shape[1] // BLOCK_K))
    if x_scale.dtype != torch.float32 or tuple(x_scale.shape) != shape:
        raise invalid(
            op,
            "x_scale",
            f"float32 of shape {shape}",
            f"{x_scale.dtype} of shape {tuple(x_scale.shape)}",
        )
    if x_scale.device != x.device:
        raise invalid(op, "x_scale", f"on {x.device}", x_scale.device)


def _check_common(op: str, scale_format: str, out_dtype: torch.dtype, impl: str) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if scale_format not in SCALE_FORMATS:
        raise UnsupportedError(op, f"scale_format {scale_format!r}", SCALE_FORMATS)
    if out_dtype not in _OUT_DTYPES:
        raise invalid(op, "out_dtype", "bfloat16, float16 or float32", out_dtype)


def fp8_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    scale_format: str,
    impl: str,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """y = round(sum over blocks b of 128 k, ascending, of (x_b W_b^T) * (s_x * s_w)).

    Source: DeepSeek-V3 report, arXiv 2412.19437, section 3.3; DeepGEMM's `fp8_gemm_nt`.

    Args:
        x: [M, K] float8_e4m3fn contiguous; x_scale: [M, ceil(K / 128)] fp32, any strides; both from
            `quantize_rows`.
        weight: [N, K] float8_e4m3fn; weight_scale: [ceil(N / 128), ceil(K / 128)] fp32; both
            contiguous, from `quantize_weight`.
        scale_format: what both scales hold, "fp32" or "ue8m0".
        impl: "reference" (any device), "triton" (CUDA) or "deep_gemm" (Hopper; Blackwell with
            "ue8m0"; N in multiples of 64, K of 128, bf16 out).
        out_dtype: bf16, fp16 or fp32.

    Returns:
        [M, N] contiguous.

    Numerics:
        A row's bits depend on that row and the weight alone. Columns are independent: a fused
        weight gives the bits of its parts (cuts at multiples of 128 columns).

    Raises:
        InvalidInputError: shape, dtype or layout.
        UnsupportedError: unknown impl, or one that cannot serve this shape, device or format.
    """
    _check_common("fp8_gemm", scale_format, out_dtype, impl)
    _check_rows("fp8_gemm", x, x_scale)
    _check_weight("fp8_gemm", weight, weight_scale, x.shape[1])
    if weight.device != x.device:
        raise invalid("fp8_gemm", "weight", f"on {x.device}", weight.device)
    return torch.ops.consistent_kernels.fp8_gemm(
        x, x_scale, weight, weight_scale, scale_format, out_dtype, impl
    )


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    scale_format: str,
    impl: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = fp8_gemm(quantize_rows(x), weight): a linear layer with FP8 operands.

    Args:
        x: [M, K], bf16, fp16 or fp32; rows may be strided.
        weight, weight_scale: from `quantize_weight` of the same scale_format.
        scale_format, impl: as in `fp8_gemm`; x is quantized by the Triton program for "deep_gemm".
        out_dtype: the dtype of x where None.

    Returns:
        [M, N] contiguous.

    Raises:
        InvalidInputError, UnsupportedError: as `fp8_gemm` and `quantize_rows`.
    """
    _check_common("fp8_linear", scale_format, out_dtype or torch.bfloat16, impl)
    if x.dim() != 2 or x.dtype not in _OUT_DTYPES:
        expected = "2-D bfloat16, float16 or float32"
        raise invalid("fp8_linear", "x", expected, f"{x.dim()}-D {x.dtype}")
    if weight.device != x.device:
        raise invalid("fp8_linear", "weight", f"on {x.device}", weight.device)
    _check_weight("fp8_linear", weight, weight_scale, x.shape[1])
    values, scale = quantize_rows(
        x,
        scale_format=scale_format,
        impl=quantization_of(impl),
        tma_aligned=impl == "deep_gemm",
    )
    return fp8_gemm(
        values,
        scale,
        weight,
        weight_scale,
        scale_format=scale_format,
        impl=impl,
        out_dtype=x.dtype if out_dtype is None else out_dtype,
    )


def warm_up(weight: torch.Tensor, *, scale_format: str, impl: str) -> None:
    """Compile and probe what calls with a weight of this shape need, outside any graph capture.

    The first call would do the same, but it may not happen while a CUDA graph is captured: the
    probe waits for the device.

    Args:
        weight: [N, K], on the device that will run it.

    Raises:
        UnsupportedError: the implementation does not serve the shape.
        NumericsError: its bits follow the batch.
    """
    _check_common("warm_up", scale_format, torch.bfloat16, impl)
    if impl == "deep_gemm":
        from consistent_kernels.fp8_linear.deep_gemm import start

        start(*weight.shape, torch.bfloat16, scale_format, weight.device)


def fp8_linear_bwd(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    needs: tuple[bool, bool] = (True, True),
    weight_dtype: torch.dtype = torch.float32,
    impl: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Straight-through gradients: grad_x = g D(W), grad_weight = g^T D(x), fp32 accumulation.

    D(q) = q * s is what the forward multiplied, so these are the exact derivatives of the forward
    once rounding is taken as the identity. Source: DeepSeek-V3 report, section 3.3, whose weight
    gradient reads the FP8 activations of the forward too; here the two GEMMs run in bf16 (CUDA) or
    fp32 (CPU) instead of FP8, and grad_y is not quantized.

    Args:
        grad_y: [M, N], bf16, fp16 or fp32; the rest as in `fp8_gemm`.
        needs: which of (x, weight) want a gradient.
        weight_dtype: dtype of grad_weight, rounded once from fp32.

    Returns:
        (grad_x [M, K] fp32 on CPU and bf16 on CUDA, grad_weight [N, K]), None where not needed.

    Raises:
        InvalidInputError: shape, dtype, layout or device. UnsupportedError: unknown impl.
    """
    op = "fp8_linear_bwd"
    require_implementation(op, impl, IMPLEMENTATIONS)
    _check_rows(op, x, x_scale)
    _check_weight(op, weight, weight_scale, x.shape[1])
    if weight.device != x.device:
        raise invalid(op, "weight", f"on {x.device}", weight.device)
    shape = (x.shape[0], weight.shape[0])
    if tuple(grad_y.shape) != shape or grad_y.dtype not in _OUT_DTYPES or grad_y.device != x.device:
        raise invalid(
            op,
            "grad_y",
            f"bfloat16, float16 or float32 of shape {shape} on {x.device}",
            f"{grad_y.dtype} of shape {tuple(grad_y.shape)} on {grad_y.device}",
        )
    if weight_dtype not in _OUT_DTYPES:
        raise invalid(op, "weight_dtype", "bfloat16, float16 or float32", weight_dtype)
    return fp8_linear_bwd_ref(grad_y, x, x_scale, weight, weight_scale, needs, weight_dtype)
