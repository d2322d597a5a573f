"""Public router: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.router.parameters import RouterParameters
from consistent_kernels.router.reference import router_bwd_ref, router_ref
from consistent_kernels.router.spec import IMPLEMENTATIONS

_INTEGERS = (torch.int32, torch.int64)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "router(Tensor logits, Tensor? bias, Tensor? forced, Tensor? valid, int top_k, str scoring, "
    "bool renormalize, float scale, int num_groups, int top_groups, str impl) -> (Tensor, Tensor)"
)


def _router(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    forced: torch.Tensor | None,
    valid: torch.Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    count("router", impl)
    if forced is not None and forced.device.type == "cpu":
        named = forced if valid is None else forced[valid]
        _require_experts("router", "forced", named, logits.shape[1])
    parameters = RouterParameters(
        num_experts=logits.shape[1],
        top_k=top_k,
        scoring=scoring,
        renormalize=renormalize,
        scale=scale,
        num_groups=num_groups,
        top_groups=top_groups,
    )
    if impl == "reference":
        return router_ref(logits, bias, forced, valid, parameters)
    require_cuda("router", impl, logits)
    from consistent_kernels.router.triton import router_fwd

    return router_fwd(logits, bias, forced, valid, parameters)


_LIBRARY.impl("router", _router, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::router", lib=_LIBRARY)
def _(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    forced: torch.Tensor | None,
    valid: torch.Tensor | None,
    top_k: int,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


def _validate(op: str, logits: torch.Tensor, parameters: RouterParameters, impl: str) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if logits.dim() != 2 or logits.shape[1] != parameters.num_experts:
        raise invalid(op, "logits", f"[T, {parameters.num_experts}]", tuple(logits.shape))
    if logits.dtype != torch.float32:
        raise invalid(
            op, "logits", torch.float32, logits.dtype, "Call linear with out_dtype=torch.float32"
        )


def _require(
    op: str,
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple,
    like: torch.device,
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device != like:
        kinds = " or ".join(str(dtype) for dtype in dtypes)
        raise invalid(
            op,
            name,
            f"{kinds} of shape {shape} on {like}",
            f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}",
        )


def router(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    parameters: RouterParameters,
    forced: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token and weight them.

    With p = scoring(logits) and c = p + bias: the experts of the `top_groups` best groups (a group
    scores the sum of its two largest c with a bias, its largest without), of these the `top_k`
    largest c, lower ids winning ties; weight = p / (sum of the chosen p) * scale, without the
    division where `renormalize` is False.

    Source: DeepSeek-V3, arXiv 2412.19437; `grouped_topk` and `fused_topk_bias` of vLLM's
    fused_moe/router; transformers' Qwen3MoeTopKRouter, DeepseekV4TopKRouter, DeepseekV4HashRouter.

    Args:
        logits: [T, E] fp32, from `linear(..., out_dtype=torch.float32)`.
        bias: [E] fp32, DeepSeek's e_score_correction_bias: it takes part in the choice alone.
        parameters: see `RouterParameters`.
        forced: [T, K] int32 or int64, expert ids of a hash-routed layer (`hash_expert_ids`); then
            nothing is chosen and the bias is not read.
        valid: [T] bool; other rows are padding and go nowhere.
        impl: "reference" (any device) or "triton" (CUDA).

    Returns:
        (ids [T, K] int32 by descending choice, weights [T, K] fp32); (-1, +0.0) in invalid rows.

    Numerics:
        A row's bits depend on that row alone. A row of NaN keeps ids in range and NaN weights.

    Raises:
        InvalidInputError: shape, dtype or device; a forced id out of range in a valid row (checked
            on CPU: on CUDA the check would wait for the device, and such a slot has weight 0).
        UnsupportedError: unknown impl or scoring.
    """
    op = "router"
    _validate(op, logits, parameters, impl)
    rows, device = logits.shape[0], logits.device
    if bias is not None:
        _require(op, "bias", bias, (parameters.num_experts,), (torch.float32,), device)
    if forced is not None:
        _require(op, "forced", forced, (rows, parameters.top_k), _INTEGERS, device)
        if parameters.num_groups > 1:
            raise invalid(op, "forced", "None where experts are grouped", "hash-routed ids")
    if valid is not None:
        _require(op, "valid", valid, (rows,), (torch.bool,), device)
    return torch.ops.consistent_kernels.router(
        logits,
        None if forced is not None else bias,
        forced,
        valid,
        parameters.top_k,
        parameters.scoring,
        parameters.renormalize,
        parameters.scale,
        parameters.num_groups,
        parameters.top_groups,
        impl,
    )


def router_bwd(
    grad_weights: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    parameters: RouterParameters,
    impl: str,
) -> torch.Tensor:
    """Gradient of the weights; both implementations use the PyTorch form, in fp32.

    Args:
        grad_weights: [T, K] fp32; logits: [T, E] fp32; ids: [T, K] as `router` returned them.

    Returns:
        [T, E] fp32. The choice of experts and the correction bias have no gradient; rows routed
        nowhere (ids -1) have zeros, whatever their logits and grad_weights hold.

    Raises:
        InvalidInputError: shape, dtype or device, an id out of range (on CPU).
        UnsupportedError: unknown impl.
    """
    op, device = "router_bwd", logits.device
    _validate(op, logits, parameters, impl)
    shape = (logits.shape[0], parameters.top_k)
    _require(op, "ids", ids, shape, _INTEGERS, device)
    _require(op, "grad_weights", grad_weights, shape, (torch.float32,), device)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        _require_experts(op, "ids", ids, logits.shape[1], lowest=-1)
    # On a GPU the order of PyTorch's sums follows the layout.
    packed = (tensor.contiguous() for tensor in (grad_weights, logits, ids))
    return router_bwd_ref(*packed, parameters)


def hash_expert_ids(
    table: torch.Tensor, token_ids: torch.Tensor, *, num_experts: int
) -> torch.Tensor:
    """Expert ids of a hash-routed layer: rows of its table, DeepSeek-V4's `tid2eid`.

    Args:
        table: [V, K] int32 or int64.
        token_ids: [T] int32 or int64.
        num_experts: E; checked where `table` is on the CPU.

    Returns:
        [T, K] int32. Where a row of the table names an expert twice, lay experts out "contiguous".

    Raises:
        InvalidInputError: shape or dtype, an expert or token id out of range (CPU).
    """
    op = "hash_expert_ids"
    if table.dim() != 2 or table.dtype not in _INTEGERS:
        raise invalid(op, "table", "2-D int32 or int64", f"{table.dim()}-D {table.dtype}")
    if token_ids.dim() != 1 or token_ids.dtype not in _INTEGERS:
        raise invalid(
            op, "token_ids", "1-D int32 or int64", f"{token_ids.dim()}-D {token_ids.dtype}"
        )
    if token_ids.device != table.device:
        raise invalid(op, "token_ids", f"on {table.device}", token_ids.device)
    if token_ids.device.type == "cpu" and token_ids.numel():
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= table.shape[0]:
            raise invalid(op, "token_ids", f"in [0, {table.shape[0]})", f"{low} to {high}")
    ids = table.index_select(0, token_ids.long()).int()
    if ids.device.type == "cpu":
        _require_experts(op, "table", ids, num_experts)
    return ids


def _require_experts(
    op: str, name: str, ids: torch.Tensor, num_experts: int, lowest: int = 0
) -> None:
    if not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < lowest or high >= num_experts:
        raise invalid(op, name, f"expert ids in [{lowest}, {num_experts})", f"{low} to {high}")
