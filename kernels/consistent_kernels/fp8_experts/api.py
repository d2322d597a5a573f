"""Public FP8 experts: validate, take the named implementation, call it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda
from consistent_kernels.errors import UnsupportedError, invalid, require_implementation
from consistent_kernels.experts import combine
from consistent_kernels.experts.api import (
    check_ids,
    validate_backward,
    validate_shared,
    validate_slots,
)
from consistent_kernels.experts.backward import Grads
from consistent_kernels.experts.spec import LAYOUTS
from consistent_kernels.fp8_experts.backward import fp8_experts_bwd_ref
from consistent_kernels.fp8_experts.reference import fp8_expert_outputs_ref
from consistent_kernels.fp8_experts.spec import (
    BLOCK_K,
    IMPLEMENTATIONS,
    experts_of,
    quantization_of,
)
from consistent_kernels.quantization import quantize_weight
from consistent_kernels.quantization.spec import SCALE_FORMATS

_FP8 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "fp8_expert_outputs(Tensor x, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, "
    "Tensor ids, float? limit, str scale_format, str layout, str impl) -> Tensor"
)
_LIBRARY.define(
    "fp8_experts(Tensor x, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor ids, "
    "Tensor weights, Tensor? shared, float? limit, str scale_format, str layout) -> Tensor"
)


@dataclasses.dataclass(frozen=True)
class Fp8ExpertWeight:
    """Stacked weights in FP8.

    Attributes:
        values: [E, N, K] float8_e4m3fn contiguous.
        scale: [E, ceil(N / 128), ceil(K / 128)] fp32 contiguous.
    """

    values: torch.Tensor
    scale: torch.Tensor


def quantize_expert_weight(
    master: torch.Tensor,
    *,
    scale_format: str,
    impl: str,
    model_dtype: torch.dtype = torch.bfloat16,
) -> Fp8ExpertWeight:
    """Quantize stacked masters expert by expert with `quantize_weight`, on both sides alike.

    Args:
        master: [E, N, K], fp32 or the model dtype; gate rows before up rows where it is w13, and
            then N / 2 a multiple of 128, so that no block holds rows of both.
        scale_format: "fp32" or "ue8m0".
        impl: of the experts.
        model_dtype: the master is rounded to it first.

    Raises:
        InvalidInputError: not 3-D, or empty. UnsupportedError: unknown impl or scale_format.
    """
    require_implementation("quantize_expert_weight", impl, IMPLEMENTATIONS)
    if master.dim() != 3 or 0 in master.shape:
        raise invalid("quantize_expert_weight", "master", "[E, N, K]", tuple(master.shape))
    options = {
        "scale_format": scale_format,
        "impl": quantization_of(impl),
        "model_dtype": model_dtype,
    }
    experts, columns, inner = master.shape
    if columns % BLOCK_K == 0:
        # No block holds rows of two experts: one call for all of them.
        values, scale = quantize_weight(master.reshape(-1, inner), **options)
        return Fp8ExpertWeight(values.view(master.shape), scale.view(experts, -1, scale.shape[1]))
    pairs = [quantize_weight(expert.contiguous(), **options) for expert in master]
    values, scales = zip(*pairs, strict=True)
    # float8 has no stack on some devices: bytes have.
    stacked = torch.stack([value.view(torch.uint8) for value in values]).view(_FP8)
    return Fp8ExpertWeight(stacked, torch.stack(scales))


def _fp8_expert_outputs(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    scale_format: str,
    layout: str,
    impl: str,
) -> torch.Tensor:
    count("fp8_experts", impl)
    check_ids("fp8_experts", ids, w13.shape[0])
    given = (x, w13, w13_scale, w2, w2_scale, ids, limit, scale_format, layout)
    if impl == "reference":
        return fp8_expert_outputs_ref(*given)
    require_cuda("fp8_experts", impl, x)
    if impl == "deep_gemm":
        from consistent_kernels.fp8_experts.deep_gemm import fp8_expert_outputs_deep_gemm

        return fp8_expert_outputs_deep_gemm(*given)
    from consistent_kernels.fp8_experts.triton import fp8_expert_outputs_fwd

    return fp8_expert_outputs_fwd(*given)


_LIBRARY.impl("fp8_expert_outputs", _fp8_expert_outputs, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::fp8_expert_outputs", lib=_LIBRARY)
def _(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    ids: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    return x.new_empty((*ids.shape, w2.shape[1]))


def _fp8_experts_deep_gemm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    count("fp8_experts", "deep_gemm")
    require_cuda("fp8_experts", "deep_gemm", x)
    from consistent_kernels.fp8_experts.deep_gemm import fp8_experts_deep_gemm

    return fp8_experts_deep_gemm(x, *rest)


_LIBRARY.impl("fp8_experts", _fp8_experts_deep_gemm, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::fp8_experts", lib=_LIBRARY)
def _(
    x: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, *_: object
) -> torch.Tensor:
    return x.new_empty((x.shape[0], w2.shape[1]))


def _validate(
    op: str,
    x: torch.Tensor,
    w13: Fp8ExpertWeight,
    w2: Fp8ExpertWeight,
    ids: torch.Tensor,
    scale_format: str,
    impl: str,
) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if scale_format not in SCALE_FORMATS:
        raise UnsupportedError(op, f"scale_format {scale_format!r}", SCALE_FORMATS)
    if x.dim() != 2 or x.dtype not in _DTYPES:
        raise invalid(op, "x", "2-D bfloat16, float16 or float32", f"{x.dim()}-D {x.dtype}")
    _check_weight(op, "w13", w13, x.shape[1], x.device)
    experts, both, _ = w13.values.shape
    if both % (2 * BLOCK_K):
        raise invalid(
            op,
            "w13",
            f"[E, 2 I, {x.shape[1]}] with I a multiple of {BLOCK_K}: a block holds one side's rows",
            tuple(w13.values.shape),
        )
    _check_weight(op, "w2", w2, both // 2, x.device)
    shape = (experts, x.shape[1], both // 2)
    if tuple(w2.values.shape) != shape:
        raise invalid(op, "w2", f"of shape {shape}", tuple(w2.values.shape))
    if (
        ids.dim() != 2
        or ids.shape[0] != x.shape[0]
        or not ids.shape[1]
        or ids.dtype not in _INTEGERS
        or ids.device != x.device
    ):
        raise invalid(
            op,
            "topk_ids",
            f"int32 or int64 of shape ({x.shape[0]}, K) on {x.device}",
            f"{ids.dtype} of shape {tuple(ids.shape)} on {ids.device}",
        )


def _check_weight(
    op: str, name: str, weight: Fp8ExpertWeight, inner: int, device: torch.device
) -> None:
    if not isinstance(weight, Fp8ExpertWeight):
        hint = "Quantize it with quantize_expert_weight"
        raise invalid(op, name, "a Fp8ExpertWeight", type(weight).__name__, hint)
    values, scale = weight.values, weight.scale
    if values.dim() != 3 or values.dtype != _FP8 or values.shape[2] != inner:
        raise invalid(
            op,
            name,
            f"{_FP8} of shape (E, N, {inner})",
            f"{values.dtype} of shape {tuple(values.shape)}",
            "Quantize it with quantize_expert_weight",
        )
    experts, columns, _ = values.shape
    shape = (experts, -(-columns // BLOCK_K), -(-inner // BLOCK_K))
    if scale.dtype != torch.float32 or tuple(scale.shape) != shape:
        raise invalid(
            op,
            f"{name}.scale",
            f"float32 of shape {shape}",
            f"{scale.dtype} of shape {tuple(scale.shape)}",
        )
    for part, tensor in ((name, values), (f"{name}.scale", scale)):
        if not tensor.is_contiguous():
            raise invalid(op, part, "contiguous", f"strides {tensor.stride()}")
        if tensor.device != device:
            raise invalid(op, part, f"on {device}", tensor.device)


def fp8_expert_outputs(
    x: torch.Tensor,
    w13: Fp8ExpertWeight,
    w2: Fp8ExpertWeight,
    topk_ids: torch.Tensor,
    *,
    scale_format: str,
    limit: float | None = None,
    layout: str = "contiguous",
    impl: str,
) -> torch.Tensor:
    """`expert_outputs` with `fp8_linear` in place of each GEMM.

    Args:
        x: [T, H], bf16, fp16 or fp32; quantized per row in groups of 128.
        w13: [E, 2 I, H], I a multiple of 128; w2: [E, H, I]; from `quantize_expert_weight`.
        topk_ids: [T, K]; -1 sends a slot nowhere.
        scale_format: "fp32" or "ue8m0", of weights and rows.
        limit: DeepSeek-V4's swiglu_limit, or None.
        layout: as in `expert_outputs`; the bits are the same.
        impl: "reference" (any device), "triton" (CUDA) or "deep_gemm" (Hopper; Blackwell with
            "ue8m0"; x bf16, H a multiple of 128).

    Returns:
        [T, K, H]; slots that go nowhere are unspecified, and `combine` does not read them.

    Numerics:
        y[t, k] depends on x[t] and the weights of its expert alone.

    Raises:
        InvalidInputError: shape, dtype or device; an id out of range (checked on CPU).
        UnsupportedError: unknown impl, scale_format or layout.
    """
    _validate_forward(x, w13, w2, topk_ids, scale_format, limit, layout, impl)
    return torch.ops.consistent_kernels.fp8_expert_outputs(
        x, w13.values, w13.scale, w2.values, w2.scale, topk_ids, limit, scale_format, layout, impl
    )


def _validate_forward(
    x: torch.Tensor,
    w13: Fp8ExpertWeight,
    w2: Fp8ExpertWeight,
    ids: torch.Tensor,
    scale_format: str,
    limit: float | None,
    layout: str,
    impl: str,
) -> None:
    op = "fp8_experts"
    _validate(op, x, w13, w2, ids, scale_format, impl)
    if layout not in LAYOUTS:
        raise UnsupportedError(op, f"layout {layout!r}", LAYOUTS)
    if limit is not None and not limit > 0:
        raise invalid(op, "limit", "positive or None", limit)


def fp8_experts(
    x: torch.Tensor,
    w13: Fp8ExpertWeight,
    w2: Fp8ExpertWeight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    *,
    scale_format: str,
    limit: float | None = None,
    layout: str = "contiguous",
    impl: str,
) -> torch.Tensor:
    """`combine` of `fp8_expert_outputs`: arguments and errors as there.

    Returns:
        [T, H], dtype of x.
    """
    _validate_forward(x, w13, w2, topk_ids, scale_format, limit, layout, impl)
    validate_slots("fp8_experts", topk_ids, topk_weights)
    validate_shared("fp8_experts", shared, x)
    if impl == "deep_gemm":
        # One launch less, and the rows are not written once more.
        stacked = (w13.values, w13.scale, w2.values, w2.scale)
        return torch.ops.consistent_kernels.fp8_experts(
            x, *stacked, topk_ids, topk_weights, shared, limit, scale_format, layout
        )
    y = torch.ops.consistent_kernels.fp8_expert_outputs(
        x, w13.values, w13.scale, w2.values, w2.scale, topk_ids, limit, scale_format, layout, impl
    )
    return combine(y, topk_ids, topk_weights, shared, impl=experts_of(impl))


def fp8_experts_bwd(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    w13: Fp8ExpertWeight,
    w2: Fp8ExpertWeight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    scale_format: str,
    limit: float | None = None,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
    grad_x_dtype: torch.dtype | None = None,
    impl: str,
) -> Grads:
    """Straight-through gradients: those of `experts` at the values that the forward multiplied.

    Args:
        grad_out: [T, H], dtype of x, also the gradient of `shared`; the rest as in `fp8_experts`.
        needs: which of (x, w13, w2, topk_weights) want a gradient.
        grad_x_dtype: of the first result; that of x by default.

    Returns:
        (grad_x [T, H], grad_w13 and grad_w2 fp32, grad_weights [T, K] fp32), None
        where not needed.

    Raises:
        InvalidInputError, UnsupportedError: as the forward.
    """
    op = "fp8_experts_bwd"
    _validate(op, x, w13, w2, topk_ids, scale_format, impl)
    validate_slots(op, topk_ids, topk_weights)
    validate_backward(op, grad_out, x, topk_ids, w2.values.shape[0], limit)
    grad_out, x, topk_weights = (each.contiguous() for each in (grad_out, x, topk_weights))
    grads = fp8_experts_bwd_ref(
        grad_out,
        x,
        w13.values,
        w13.scale,
        w2.values,
        w2.scale,
        topk_ids,
        topk_weights,
        limit,
        scale_format,
        needs,
    )
    grad_x = None if grads[0] is None else grads[0].to(grad_x_dtype or x.dtype)
    return grad_x, *grads[1:]
