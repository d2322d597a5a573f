"""Public linear: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.linear.onednn import linear_onednn, linear_packed_onednn
from consistent_kernels.linear.packing import PackedWeight, packed_weight
from consistent_kernels.linear.reference import linear_bwd_ref, linear_ref
from consistent_kernels.linear.spec import IMPLEMENTATIONS
from consistent_kernels.master import round_master

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, ScalarType out_dtype, str impl) -> Tensor"
)
_LIBRARY.define(
    "linear_packed(Tensor x, Tensor? bias, ScalarType out_dtype, int columns, int packed, str impl)"
    " -> Tensor"
)


def _check_impl(op: str, impl: str) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    impl: str,
) -> torch.Tensor:
    count("linear", impl)
    if impl == "reference":
        return linear_ref(x, weight, bias, out_dtype)
    if impl == "onednn":
        return linear_onednn(x, weight, bias, out_dtype)
    if impl == "llvm":
        from consistent_kernels.linear.llvm import linear_llvm as linear_fwd
    elif impl == "deep_gemm":
        from consistent_kernels.linear.deep_gemm import linear_fwd
    else:
        from consistent_kernels.linear.triton import linear_fwd
    return linear_fwd(x, weight, bias, out_dtype)


def _linear_packed(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    columns: int,
    packed: int,
    impl: str,
) -> torch.Tensor:
    count("linear", impl)
    if impl == "onednn":
        return linear_packed_onednn(x, packed_weight(packed), bias)
    from consistent_kernels.linear.llvm import linear_packed_llvm

    return linear_packed_llvm(x, packed_weight(packed), columns, bias, out_dtype)


_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
_LIBRARY.impl("linear_packed", _linear_packed, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::linear", lib=_LIBRARY)
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    impl: str,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


@torch.library.register_fake("consistent_kernels::linear_packed", lib=_LIBRARY)
def _(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    columns: int,
    packed: int,
    impl: str,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], columns), dtype=out_dtype)


def _prepared_dtype(dtype: torch.dtype, impl: str, out_dtype: torch.dtype | None) -> torch.dtype:
    fp32 = impl == "reference" or (impl == "onednn" and out_dtype == torch.float32)
    return torch.float32 if fp32 else dtype


def prepare_weight(
    master: torch.Tensor,
    *,
    dtype: torch.dtype,
    impl: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Round a master weight to the model dtype, in the form that `linear` of `impl` reads.

    Args:
        master: [N, K], fp32 or the model dtype.
        dtype: the model dtype, e.g. bf16; the cast rounds to nearest even.
        impl: "reference" returns fp32 holding the rounded values (most CPUs multiply those
            fastest), the others return `dtype` (the master itself, where it already is contiguous
            `dtype`).
        out_dtype: what `linear` will be asked for; with "onednn" and fp32 (lm_head) the weight is
            fp32 as for "reference".

    Returns:
        [N, K] contiguous. It does not follow later changes of `master`: prepare again after each.

    Raises:
        UnsupportedError: unknown impl.
    """
    _check_impl("prepare_weight", impl)
    return round_master(master, dtype, _prepared_dtype(dtype, impl, out_dtype))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    impl: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = round(x W^T + b): fp32 accumulation over ascending K, bias in fp32, one rounding.

    Args:
        x: [T, K], bf16, fp16 or fp32; rows may be strided.
        weight: [N, K], from `prepare_weight` with the same impl and out_dtype.
        bias: [N] in the dtype of x (round a master first), or None.
        impl: "reference" (any device), "llvm" (x86 CPUs, bf16), "onednn" (CPUs with bf16
            instructions), "triton" (CUDA) or "deep_gemm" (CUDA, sm_90 and sm_100; needs vLLM's
            CUDA wheel).
        out_dtype: dtype of the result: the dtype of x (the default), or fp32 for lm_head.

    Returns:
        [T, N] contiguous.

    Numerics:
        A row's bits depend on that row and the weight alone. Columns are independent: a
        fused weight gives the bits of its parts (cuts at multiples of 64 columns).

    Raises:
        InvalidInputError: shape, dtype or device.
        UnsupportedError: unknown impl, or one that this machine cannot run.
    """
    _check_impl("linear", impl)
    if x.dim() != 2 or x.dtype not in _DTYPES:
        raise invalid("linear", "x", "2-D bfloat16, float16 or float32", f"{x.dim()}-D {x.dtype}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise invalid("linear", "weight", f"of shape (N, {x.shape[1]})", tuple(weight.shape))
    if out_dtype not in (None, x.dtype, torch.float32):
        raise invalid("linear", "out_dtype", f"{x.dtype} or torch.float32", out_dtype)
    expected = _prepared_dtype(x.dtype, impl, out_dtype)
    if weight.dtype != expected or not weight.is_contiguous():
        raise invalid(
            "linear",
            "weight",
            f"contiguous {expected} for impl {impl!r}",
            f"{weight.dtype}, contiguous={weight.is_contiguous()}",
            "Pass it through prepare_weight(..., impl=, out_dtype=) first",
        )
    if weight.device != x.device:
        raise invalid("linear", "weight", f"on {x.device}", weight.device)
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise invalid(
            "linear",
            "bias",
            f"{x.dtype} of shape ({weight.shape[0]},)",
            f"{bias.dtype} of shape {tuple(bias.shape)}",
        )
    return torch.ops.consistent_kernels.linear(x, weight, bias, out_dtype or x.dtype, impl)


def linear_packed(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = round(x W^T + b) from a packed weight: bit-equal to `linear(..., impl=packed.impl)`.

    For an engine, which multiplies by one weight many times; it has no backward.

    Args:
        x: [T, K] bf16.
        packed: from `pack_weight`, rebuilt after each change of the weight.
        bias: [N] bf16, or None.
        out_dtype: bf16 (the default), or with "llvm" fp32.

    Returns:
        [T, N] in `out_dtype`.

    Raises:
        InvalidInputError: shape or dtype.
    """
    op = "linear_packed"
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] != packed.inner:
        raise invalid(op, "x", f"bfloat16 [T, {packed.inner}]", f"{x.dtype} {tuple(x.shape)}")
    if bias is not None and (bias.shape != (packed.columns,) or bias.dtype != x.dtype):
        raise invalid(
            op, "bias", f"bfloat16 ({packed.columns},)", f"{bias.dtype} {tuple(bias.shape)}"
        )
    out_dtype = out_dtype or x.dtype
    allowed = (x.dtype, torch.float32) if packed.impl == "llvm" else (x.dtype,)
    if out_dtype not in allowed:
        raise invalid(op, "out_dtype", " or ".join(map(str, allowed)), out_dtype)
    return torch.ops.consistent_kernels.linear_packed(
        x, bias, out_dtype, packed.columns, packed.number, packed.impl
    )


def linear_bwd(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    needs: tuple[bool, bool, bool] = (True, True, True),
    impl: str,
    weight_dtype: torch.dtype = torch.float32,
    add_to: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `linear`, fp32 accumulation: PyTorch's GEMM, or "llvm"'s own for bf16.

    Args:
        grad_y: [T, N]; x: [T, K]; weight: [N, K] prepared.
        needs: which of (x, weight, bias) want a gradient.
        weight_dtype: dtype of grad_weight, rounded once from fp32 sums: the master's.
        add_to: [N, K] fp32 to add grad_weight to; the sum is returned in its place.

    Returns:
        (grad_x [T, K] in the dtype of x, grad_weight [N, K], grad_bias [N] fp32), None where not
        needed.
    """
    _check_impl("linear_bwd", impl)
    if grad_y.shape != (x.shape[0], weight.shape[0]):
        raise invalid(
            "linear_bwd", "grad_y", f"of shape {(x.shape[0], weight.shape[0])}", tuple(grad_y.shape)
        )
    # Gradients of fp32 logits, and sums onto another gradient, go the reference's way.
    is_bf16 = grad_y.dtype == x.dtype == weight.dtype == torch.bfloat16 and add_to is None
    if impl == "llvm" and is_bf16 and weight_dtype in (torch.bfloat16, torch.float32):
        from consistent_kernels.linear.llvm import linear_bwd_llvm

        return linear_bwd_llvm(grad_y, x, weight, needs, weight_dtype)
    return linear_bwd_ref(grad_y, x, weight, needs, weight_dtype, add_to)
