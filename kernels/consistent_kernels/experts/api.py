"""Public experts: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda
from consistent_kernels.errors import UnsupportedError, invalid, require_implementation
from consistent_kernels.experts.backward import Grads, experts_bwd_ref
from consistent_kernels.experts.reference import LINEAR, combine_ref, expert_outputs_ref
from consistent_kernels.experts.spec import IMPLEMENTATIONS, LAYOUTS
from consistent_kernels.master import round_master

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int32, torch.int64)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "expert_outputs(Tensor x, Tensor w13, Tensor w2, Tensor ids, float? limit, str layout, "
    "str impl) -> Tensor"
)
_LIBRARY.define("combine(Tensor y, Tensor ids, Tensor weights, Tensor? shared, str impl) -> Tensor")


def _expert_outputs(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    limit: float | None,
    layout: str,
    impl: str,
) -> torch.Tensor:
    count("experts", impl)
    check_ids("experts", ids, w13.shape[0])
    if impl in LINEAR:
        return expert_outputs_ref(x, w13, w2, ids, limit, layout, LINEAR[impl])
    require_cuda("experts", impl, x)
    if impl == "deep_gemm":
        from consistent_kernels.experts.deep_gemm import expert_outputs_deep_gemm

        return expert_outputs_deep_gemm(x, w13, w2, ids, limit, layout)
    from consistent_kernels.experts.triton import expert_outputs_fwd

    return expert_outputs_fwd(x, w13, w2, ids, limit, layout)


def _combine(
    y: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    impl: str,
) -> torch.Tensor:
    if impl in LINEAR:
        return combine_ref(y, ids, weights, shared)
    require_cuda("combine", impl, y)
    from consistent_kernels.experts.triton import combine_fwd

    return combine_fwd(y, ids, weights, shared)


_LIBRARY.impl("expert_outputs", _expert_outputs, "CompositeExplicitAutograd")
_LIBRARY.impl("combine", _combine, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::expert_outputs", lib=_LIBRARY)
def _(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, *_: object
) -> torch.Tensor:
    return x.new_empty((*ids.shape, w2.shape[1]))


@torch.library.register_fake("consistent_kernels::combine", lib=_LIBRARY)
def _(y: torch.Tensor, *_: object) -> torch.Tensor:
    return y.new_empty((y.shape[0], y.shape[2]))


def check_ids(op: str, ids: torch.Tensor, num_experts: int) -> None:
    """Raise InvalidInputError unless ids on a CPU are -1 or an expert's."""
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < -1 or high >= num_experts:
        raise invalid(
            op, "topk_ids", f"in [-1, {num_experts})", f"{low} to {high}", "-1 means nowhere"
        )


def _prepared_dtype(dtype: torch.dtype, impl: str) -> torch.dtype:
    return torch.float32 if impl == "reference" else dtype


def prepare_expert_weight(master: torch.Tensor, *, dtype: torch.dtype, impl: str) -> torch.Tensor:
    """Round stacked master weights to the model dtype, in the form that `experts` of `impl` reads.

    Args:
        master: [E, N, K], fp32 or the model dtype.
        dtype: the model dtype, e.g. bf16; the cast rounds to nearest even.
        impl: "reference" returns fp32 holding the rounded values, the others `dtype` (the master
            itself, where it already is contiguous `dtype`).

    Returns:
        [E, N, K] contiguous. Where it is not the master itself, it does not follow later changes.

    Raises:
        InvalidInputError: not 3-D, or no floating-point dtype. UnsupportedError: unknown impl.
    """
    op = "prepare_expert_weight"
    require_implementation(op, impl, IMPLEMENTATIONS)
    if master.dim() != 3 or master.dtype not in _DTYPES:
        raise invalid(
            op,
            "master",
            "[E, N, K], bfloat16, float16 or float32",
            f"{tuple(master.shape)}, {master.dtype}",
        )
    if dtype not in _DTYPES:
        raise invalid(op, "dtype", "bfloat16, float16 or float32", dtype)
    return round_master(master, dtype, _prepared_dtype(dtype, impl))


def _validate_weights(
    op: str, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, impl: str
) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if x.dim() != 2 or x.dtype not in _DTYPES:
        raise invalid(op, "x", "2-D bfloat16, float16 or float32", f"{x.dim()}-D {x.dtype}")
    hidden = x.shape[1]
    if w13.dim() != 3 or 0 in w13.shape or w13.shape[2] != hidden or w13.shape[1] % 2:
        raise invalid(op, "w13", f"[E, 2 I, {hidden}]", tuple(w13.shape))
    experts, width = w13.shape[0], w13.shape[1] // 2
    if tuple(w2.shape) != (experts, hidden, width):
        raise invalid(op, "w2", f"[{experts}, {hidden}, {width}]", tuple(w2.shape))
    expected = _prepared_dtype(x.dtype, impl)
    for name, weight in (("w13", w13), ("w2", w2)):
        if weight.dtype != expected or not weight.is_contiguous():
            raise invalid(
                op,
                name,
                f"contiguous {expected} for impl {impl!r}",
                f"{weight.dtype}, contiguous={weight.is_contiguous()}",
                "Pass it through prepare_expert_weight(..., impl=) first",
            )
        if weight.device != x.device:
            raise invalid(op, name, f"on {x.device}", weight.device)


def _validate_ids(op: str, ids: torch.Tensor, rows: int, device: torch.device) -> None:
    if ids.dim() != 2 or ids.shape[0] != rows or not ids.shape[1] or ids.dtype not in _INTEGERS:
        raise invalid(
            op,
            "topk_ids",
            f"int32 or int64 of shape ({rows}, K)",
            f"{ids.dtype} of shape {tuple(ids.shape)}",
        )
    if ids.device != device:
        raise invalid(op, "topk_ids", f"on {device}", ids.device)


def expert_outputs(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    limit: float | None = None,
    layout: str = "contiguous",
    impl: str,
) -> torch.Tensor:
    """y[t, k] = down_e(round(silu(gate_e(x[t])) * up_e(x[t]))) with e = topk_ids[t, k].

    Gate, up, the product and the result are each rounded once to the dtype of x; a GEMM adds in
    fp32 over ascending K; the product is computed in fp32.

    Source: Shazeer, arXiv 2002.05202 (SwiGLU); layouts as DeepGEMM's grouped GEMMs.

    Args:
        x: [T, H], bf16, fp16 or fp32.
        w13: [E, 2 I, H], gate rows before up rows, from `prepare_expert_weight`.
        w2: [E, H, I], from `prepare_expert_weight`.
        topk_ids: [T, K] int32 or int64; -1 sends a slot nowhere.
        limit: DeepSeek-V4's swiglu_limit: gate <= limit, |up| <= limit before the product.
        layout: how rows are laid out for the GEMMs, "contiguous", "masked" or "fastest" (with the
            last two the ids of a row must be distinct, as a router's are); the bits are the same.
        impl: "reference" (any device), "onednn" (CPUs with bf16 instructions), "triton" (CUDA) or
            "deep_gemm" (CUDA, sm_90 and sm_100, x bf16; needs vLLM's CUDA wheel).

    Returns:
        [T, K, H]; slots that go nowhere are unspecified, and `combine` does not read them.

    Numerics:
        y[t, k] depends on x[t] and the weights of its expert alone: not on the other rows, how many
        rows an expert has, or where they stand.

    Raises:
        InvalidInputError: shape, dtype or device; an id out of range (checked on CPU: on CUDA
            the check would wait for the device, and such a slot is unspecified).
        UnsupportedError: unknown impl or layout, or an impl that cannot run here.
    """
    op = "experts"
    _validate_weights(op, x, w13, w2, impl)
    _validate_ids(op, topk_ids, x.shape[0], x.device)
    if layout not in LAYOUTS:
        raise UnsupportedError(op, f"layout {layout!r}", LAYOUTS)
    if limit is not None and not limit > 0:
        raise invalid(op, "limit", "positive or None", limit)
    return torch.ops.consistent_kernels.expert_outputs(x, w13, w2, topk_ids, limit, layout, impl)


def combine(
    y: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    *,
    impl: str,
) -> torch.Tensor:
    """out[t] = round(sum over k in ascending order of weights[t, k] * y[t, k] + shared[t]).

    fp32 products and sums, started at +0; one rounding.

    Args:
        y: [T, K, H], rows of the experts in slot order.
        topk_ids: [T, K]; a slot of -1 adds nothing, whatever its y.
        topk_weights: [T, K] fp32.
        shared: [T, H] in the dtype of y, the shared expert's result; added last.
        impl: as in `expert_outputs`.

    Returns:
        [T, H], dtype of y.

    Raises:
        InvalidInputError: shape, dtype or device.
        UnsupportedError: unknown impl.
    """
    op = "combine"
    require_implementation(op, impl, IMPLEMENTATIONS)
    if y.dim() != 3 or y.dtype not in _DTYPES:
        raise invalid(op, "y", "3-D bfloat16, float16 or float32", f"{y.dim()}-D {y.dtype}")
    _validate_ids(op, topk_ids, y.shape[0], y.device)
    validate_slots(op, topk_ids, topk_weights)
    if topk_ids.shape[1] != y.shape[1]:
        raise invalid(op, "topk_ids", f"of {y.shape[1]} slots", topk_ids.shape[1])
    validate_shared(op, shared, y[:, 0])
    return torch.ops.consistent_kernels.combine(y, topk_ids, topk_weights, shared, impl)


def validate_shared(op: str, shared: torch.Tensor | None, like: torch.Tensor) -> None:
    """Raise InvalidInputError unless a shared expert's result is as `like` [T, H]."""
    if shared is not None and (
        shared.shape != like.shape or shared.dtype != like.dtype or shared.device != like.device
    ):
        raise invalid(
            op,
            "shared",
            f"{like.dtype} of shape {tuple(like.shape)} on {like.device}",
            f"{shared.dtype} of shape {tuple(shared.shape)} on {shared.device}",
        )


def validate_slots(op: str, ids: torch.Tensor, weights: torch.Tensor) -> None:
    if weights.shape != ids.shape or weights.dtype != torch.float32 or weights.device != ids.device:
        raise invalid(
            op,
            "topk_weights",
            f"torch.float32 of shape {tuple(ids.shape)} on {ids.device}",
            f"{weights.dtype} of shape {tuple(weights.shape)} on {weights.device}",
        )


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    *,
    limit: float | None = None,
    layout: str = "contiguous",
    impl: str,
) -> torch.Tensor:
    """A mixture-of-experts layer after its router: `combine` of `expert_outputs`.

    Args:
        x, w13, w2, topk_ids, limit, layout, impl: as in `expert_outputs`.
        topk_weights, shared: as in `combine`.

    Returns:
        [T, H], dtype of x.

    Numerics:
        A row's bits depend on that row, its ids and weights, and the experts' weights alone.

    Raises:
        InvalidInputError: shape, dtype or device; an id out of range (on CPU).
        UnsupportedError: unknown impl or layout.
    """
    if topk_ids.dim() == 2:
        validate_slots("experts", topk_ids, topk_weights)
    if x.dim() == 2:
        validate_shared("experts", shared, x)
    y = expert_outputs(x, w13, w2, topk_ids, limit=limit, layout=layout, impl=impl)
    return combine(y, topk_ids, topk_weights, shared, impl=impl)


def validate_backward(
    op: str,
    grad_out: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    limit: float | None,
) -> None:
    """Raise InvalidInputError unless a gradient is like x, and ids and limit are a forward's."""
    if grad_out.shape != x.shape or grad_out.dtype != x.dtype or grad_out.device != x.device:
        raise invalid(
            op,
            "grad_out",
            f"{x.dtype} of shape {tuple(x.shape)} on {x.device}",
            f"{grad_out.dtype} of shape {tuple(grad_out.shape)} on {grad_out.device}",
        )
    check_ids(op, ids, num_experts)
    if limit is not None and not limit > 0:
        raise invalid(op, "limit", "positive or None", limit)


def experts_bwd(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    limit: float | None = None,
    needs: tuple[bool, bool, bool, bool] = (True, True, True, True),
    grad_x_dtype: torch.dtype | None = None,
    impl: str,
) -> Grads:
    """Gradients of `experts`; all implementations use PyTorch's GEMMs with fp32 accumulation.

    Roundings pass the gradient straight through; clamped values have none. Intermediate results
    are recomputed, so that a forward keeps its inputs alone.

    Args:
        grad_out: [T, H], dtype of x, also the gradient of `shared`; the rest as in `experts`.
        needs: which of (x, w13, w2, topk_weights) want a gradient.
        grad_x_dtype: of the first result; that of x by default.

    Returns:
        (grad_x [T, H], grad_w13 and grad_w2 fp32, grad_weights [T, K] fp32), None
        where not needed.
    """
    op = "experts_bwd"
    _validate_weights(op, x, w13, w2, impl)
    _validate_ids(op, topk_ids, x.shape[0], x.device)
    validate_slots(op, topk_ids, topk_weights)
    validate_backward(op, grad_out, x, topk_ids, w2.shape[0], limit)
    grad_out, x, topk_weights = (each.contiguous() for each in (grad_out, x, topk_weights))
    grads = experts_bwd_ref(grad_out, x, w13, w2, topk_ids, topk_weights, limit, needs)
    grad_x = None if grads[0] is None else grads[0].to(grad_x_dtype or x.dtype)
    return grad_x, *grads[1:]
