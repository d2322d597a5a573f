"""Public hyper-connection maps: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda, require_device
from consistent_kernels.errors import UnsupportedError, invalid, require_implementation
from consistent_kernels.hyper_connections.backward import (
    hc_head_bwd_ref,
    hc_post_bwd_ref,
    hc_pre_bwd_ref,
)
from consistent_kernels.hyper_connections.reference import hc_head_ref, hc_post_ref, hc_pre_ref
from consistent_kernels.hyper_connections.spec import IMPLEMENTATIONS

_DTYPES = {
    "reference": (torch.bfloat16, torch.float16, torch.float32),
    "triton": (torch.bfloat16,),
}
_STREAMS = (2, 4, 8)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "hc_pre(Tensor x, Tensor fn, Tensor scale, Tensor base, float norm_eps, float eps, "
    "int iterations, float post_multiplier, str impl) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "hc_head(Tensor x, Tensor fn, Tensor scale, Tensor base, float norm_eps, float eps, "
    "str impl) -> Tensor"
)
_LIBRARY.define("hc_post(Tensor y, Tensor x, Tensor post, Tensor comb, str impl) -> Tensor")


def _check_streams(op: str, x: torch.Tensor, impl: str) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    names = ", ".join(str(dtype) for dtype in _DTYPES[impl])
    if x.dim() != 3 or x.dtype not in _DTYPES[impl]:
        raise invalid(
            op, "x", f"[T, S, H] of {names} for impl {impl!r}", f"{tuple(x.shape)} of {x.dtype}"
        )
    if x.shape[2] == 0:
        raise invalid(op, "x", "[T, S, H] with at least one column", tuple(x.shape))
    if x.shape[1] not in _STREAMS:
        raise UnsupportedError(op, f"{x.shape[1]} streams", _STREAMS)


def _check_fp32(op: str, name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    if value.dtype != torch.float32 or tuple(value.shape) != shape:
        raise invalid(
            op, name, f"torch.float32 of shape {shape}", f"{value.dtype} of {tuple(value.shape)}"
        )


def _check_maps(
    op: str,
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    impl: str,
    head: bool,
) -> None:
    _check_streams(op, x, impl)
    streams, hidden = x.shape[1:]
    columns = streams if head else (2 + streams) * streams
    _check_fp32(op, "fn", fn, (columns, streams * hidden))
    _check_fp32(op, "scale", scale, (1 if head else 3,))
    _check_fp32(op, "base", base, (columns,))
    require_device(op, x.device, fn=fn, scale=scale, base=base)


def _check_grad(
    op: str, name: str, grad: torch.Tensor, shape: tuple[int, ...], device: torch.device
) -> None:
    if tuple(grad.shape) != shape or not grad.is_floating_point():
        given = f"{grad.dtype} of shape {tuple(grad.shape)}"
        raise invalid(op, name, f"floats of shape {shape}", given)
    require_device(op, device, **{name: grad})


def _check_iterations(op: str, iterations: int) -> None:
    if not isinstance(iterations, int) or iterations < 1:
        raise invalid(op, "iterations", "an integer, at least 1", iterations)


def _check_post(
    op: str,
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    impl: str,
) -> None:
    _check_streams(op, x, impl)
    tokens, streams, hidden = x.shape
    if tuple(y.shape) != (tokens, hidden) or y.dtype != x.dtype:
        raise invalid(
            op, "y", f"{x.dtype} of shape {(tokens, hidden)}", f"{y.dtype} of {tuple(y.shape)}"
        )
    _check_fp32(op, "post", post, (tokens, streams))
    _check_fp32(op, "comb", comb, (tokens, streams, streams))
    require_device(op, x.device, y=y, post=post, comb=comb)


def _hc_pre(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    post_multiplier: float,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count("hc_pre", impl)
    arguments = (x, fn, scale, base, norm_eps, eps, iterations, post_multiplier)
    if impl == "reference":
        return hc_pre_ref(*arguments)
    require_cuda("hc_pre", impl, x)
    from consistent_kernels.hyper_connections.triton import hc_map_fwd

    return hc_map_fwd(*arguments, has_comb=True)


def _hc_head(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    eps: float,
    impl: str,
) -> torch.Tensor:
    count("hc_head", impl)
    if impl == "reference":
        return hc_head_ref(x, fn, scale, base, norm_eps, eps)
    require_cuda("hc_head", impl, x)
    from consistent_kernels.hyper_connections.triton import hc_map_fwd

    return hc_map_fwd(x, fn, scale, base, norm_eps, eps, 1, 1.0, has_comb=False)[0]


def _hc_post(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, impl: str
) -> torch.Tensor:
    count("hc_post", impl)
    if impl == "reference":
        return hc_post_ref(y, x, post, comb)
    require_cuda("hc_post", impl, x)
    from consistent_kernels.hyper_connections.triton_post import hc_post_fwd

    return hc_post_fwd(y, x, post, comb)


_LIBRARY.impl("hc_pre", _hc_pre, "CompositeExplicitAutograd")
_LIBRARY.impl("hc_head", _hc_head, "CompositeExplicitAutograd")
_LIBRARY.impl("hc_post", _hc_post, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::hc_pre", lib=_LIBRARY)
def _(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, streams, hidden = x.shape
    return (
        x.new_empty((tokens, hidden)),
        x.new_empty((tokens, streams), dtype=torch.float32),
        x.new_empty((tokens, streams, streams), dtype=torch.float32),
    )


@torch.library.register_fake("consistent_kernels::hc_head", lib=_LIBRARY)
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[2]))


@torch.library.register_fake("consistent_kernels::hc_post", lib=_LIBRARY)
def _(y: torch.Tensor, x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def hc_pre(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
    post_multiplier: float = 2.0,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse S residual streams to a sublayer's input, and form the weights that put it back.

    m = (x fn^T) / sqrt(mean(x^2) + norm_eps) over the S * H values of a token; then
    pre = sigmoid(m scale[0] + base) + eps, post = post_multiplier * sigmoid(m scale[1] + base),
    comb = Sinkhorn(softmax(m scale[2] + base) + eps); layer_input = round(sum_i pre_i x_i).

    Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880; vLLM
    0.25.1 `model_executor/kernels/mhc/torch.py` (`mhc_pre_torch`), which rounds at the same place.

    Args:
        x: [T, S, H], bf16 ("reference" also fp16, fp32); S is 2, 4 or 8.
        fn: [(2 + S) S, S * H] fp32; scale: [3] fp32; base: [(2 + S) S] fp32.
        norm_eps: of the RMS norm; eps: of pre and of every Sinkhorn division.
        iterations: of Sinkhorn, at least 1 (V4: 20).
        impl: "reference" (any device) or "triton" (CUDA).

    Returns:
        (layer_input [T, H] in the dtype of x, post [T, S] fp32, comb [T, S, S] fp32).

    Numerics:
        A token's bits depend on that token alone. The sum over S * H is cut at fixed columns, never
        by the number of tokens (stock kernels split it by the batch).

    Raises:
        InvalidInputError: shape, dtype, device or iterations.
        UnsupportedError: unknown impl or number of streams.
    """
    _check_maps("hc_pre", x, fn, scale, base, impl, head=False)
    _check_iterations("hc_pre", iterations)
    return torch.ops.consistent_kernels.hc_pre(
        x, fn, scale, base, norm_eps, eps, iterations, post_multiplier, impl
    )


def hc_head(
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    impl: str,
) -> torch.Tensor:
    """Collapse the streams behind the last layer: `hc_pre` with pre alone.

    Source: vLLM `HCHeadOp`, transformers `DeepseekV4HyperHead`.

    Args:
        x: [T, S, H]; fn: [S, S * H] fp32; scale: [1] fp32; base: [S] fp32; the rest as in `hc_pre`.

    Returns:
        [T, H] in the dtype of x.
    """
    _check_maps("hc_head", x, fn, scale, base, impl, head=True)
    return torch.ops.consistent_kernels.hc_head(x, fn, scale, base, norm_eps, eps, impl)


def hc_post(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, impl: str
) -> torch.Tensor:
    """out_j = round(post_j y + sum over i, ascending, of comb_ij x_i), fp32 up to the one rounding.

    Source: vLLM `mhc_post_torch`.

    Args:
        y: [T, H], the sublayer's output; x: [T, S, H], same dtype, the streams before it.
        post: [T, S] fp32; comb: [T, S, S] fp32, both from `hc_pre`.

    Returns:
        [T, S, H] in the dtype of x.
    """
    _check_post("hc_post", y, x, post, comb, impl)
    return torch.ops.consistent_kernels.hc_post(y, x, post, comb, impl)


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def hc_pre_bwd(
    grad_input: torch.Tensor,
    grad_post: torch.Tensor,
    grad_comb: torch.Tensor,
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
    post_multiplier: float = 2.0,
    impl: str,
) -> Gradients:
    """Gradients of `hc_pre` in fp32; both implementations use the PyTorch form.

    Returns:
        (grad_x in the dtype of x, grad_fn, grad_scale, grad_base in fp32).
    """
    _check_maps("hc_pre_bwd", x, fn, scale, base, impl, head=False)
    _check_iterations("hc_pre_bwd", iterations)
    tokens, streams, hidden = x.shape
    _check_grad("hc_pre_bwd", "grad_input", grad_input, (tokens, hidden), x.device)
    _check_grad("hc_pre_bwd", "grad_post", grad_post, (tokens, streams), x.device)
    _check_grad("hc_pre_bwd", "grad_comb", grad_comb, (tokens, streams, streams), x.device)
    grads = (grad.contiguous() for grad in (grad_input, grad_post, grad_comb))
    return hc_pre_bwd_ref(*grads, x, fn, scale, base, norm_eps, eps, iterations, post_multiplier)


def hc_head_bwd(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    impl: str,
) -> Gradients:
    """Gradients of `hc_head`: (grad_x, grad_fn, grad_scale, grad_base), as `hc_pre_bwd`."""
    _check_maps("hc_head_bwd", x, fn, scale, base, impl, head=True)
    _check_grad("hc_head_bwd", "grad_out", grad_out, (x.shape[0], x.shape[2]), x.device)
    return hc_head_bwd_ref(grad_out.contiguous(), x, fn, scale, base, norm_eps, eps)


def hc_post_bwd(
    grad_out: torch.Tensor,
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    impl: str,
) -> Gradients:
    """Gradients of `hc_post`: (grad_y, grad_x, grad_post fp32, grad_comb fp32)."""
    _check_post("hc_post_bwd", y, x, post, comb, impl)
    _check_grad("hc_post_bwd", "grad_out", grad_out, tuple(x.shape), x.device)
    return hc_post_bwd_ref(grad_out.contiguous(), y, x, post, comb)
