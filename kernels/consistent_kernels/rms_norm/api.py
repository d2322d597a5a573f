"""Public RMSNorm: validate, take the named implementation, call it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from consistent_kernels.counters import count
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.rms_norm.reference import (
    add_rms_norm_ref,
    rms_norm_bwd_ref,
    rms_norm_ref,
)
from consistent_kernels.rms_norm.spec import IMPLEMENTATIONS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps, str impl) -> Tensor")
_LIBRARY.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str impl) "
    "-> (Tensor, Tensor)"
)


def _validate(op: str, x: torch.Tensor, weight: torch.Tensor, impl: str) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if x.dtype not in _DTYPES:
        raise invalid(op, "x", "bfloat16, float16 or float32", x.dtype)
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise invalid(op, "weight", f"of shape {tuple(x.shape[-1:])}", tuple(weight.shape))
    if weight.device != x.device:
        raise invalid(op, "weight", f"on {x.device}", weight.device)


def _rows(x: torch.Tensor) -> torch.Tensor:
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@functools.cache
def _loops_module() -> Any:
    # Numba comes with vLLM; without it (or a place for its cache) the reference gives the same
    # bits, later.
    try:
        return importlib.import_module("consistent_kernels.rms_norm.loops")
    except (ImportError, RuntimeError):
        return None


def _loops(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Return the compiled loops where they serve `x` with the reference's bits, else None."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return None
    module = _loops_module()
    return module if module is not None and module.has_reference_bits(x.shape[-1]) else None


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, impl: str) -> torch.Tensor:
    count("rms_norm", impl)
    if impl == "reference":
        loops = _loops(x, weight)
        return (loops.rms_norm_loop if loops else rms_norm_ref)(x, weight, eps)
    from consistent_kernels.rms_norm.triton import rms_norm_fwd

    y, _ = rms_norm_fwd(_rows(x), None, weight, eps)
    return y.view(x.shape)


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    count("add_rms_norm", impl)
    if impl == "reference":
        loops = _loops(x, weight)
        return (loops.add_rms_norm_loop if loops else add_rms_norm_ref)(x, residual, weight, eps)
    from consistent_kernels.rms_norm.triton import rms_norm_fwd

    y, total = rms_norm_fwd(_rows(x), _rows(residual), weight, eps)
    return (y, total) if x.dim() == 2 else (y.view(x.shape), total.view(x.shape))


_LIBRARY.impl("rms_norm", _rms_norm, "CompositeExplicitAutograd")
_LIBRARY.impl("add_rms_norm", _add_rms_norm, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::rms_norm", lib=_LIBRARY)
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, impl: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.register_fake("consistent_kernels::add_rms_norm", lib=_LIBRARY)
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    like = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return like, torch.empty_like(like)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: str) -> torch.Tensor:
    """y = round(x * w / sqrt(mean(x^2) + eps)), fp32 through the weight, rounded once.

    Source: Zhang and Sennrich, arXiv 1910.07467. Rounding as vLLM's fused kernel (fp32 through the
    weight), unlike Hugging Face, which rounds before the weight.

    Args:
        x: [..., H], bf16, fp16 or fp32; the last dimension is normalized, so q/k norm passes
            [T, heads, D].
        weight: [H], any float dtype (used as fp32).
        eps: fp32.
        impl: "reference" (any device) or "triton" (CUDA).

    Returns:
        [..., H], dtype of x, contiguous.

    Numerics:
        A row's bits depend on that row alone: batch-, phase- and padding-invariant.

    Raises:
        InvalidInputError: shape, dtype or device.
        UnsupportedError: unknown impl.
    """
    _validate("rms_norm", x, weight, impl)
    return torch.ops.consistent_kernels.rms_norm(x, weight, eps, impl)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = round(x + residual); y = rms_norm(s).

    Source: vLLM's fused_add_rms_norm, with the sum rounded to the model dtype before it is squared.

    Args:
        x, residual: [..., H], same dtype.
        weight: [H]; eps, impl: as in `rms_norm`.

    Returns:
        (y, s), both [..., H] in the dtype of x.

    Raises:
        InvalidInputError: shape, dtype or device.
        UnsupportedError: unknown impl.
    """
    _validate("add_rms_norm", x, weight, impl)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise invalid(
            "add_rms_norm",
            "residual",
            f"{x.dtype} of shape {tuple(x.shape)}",
            f"{residual.dtype} of shape {tuple(residual.shape)}",
        )
    return torch.ops.consistent_kernels.add_rms_norm(x, residual, weight, eps, impl)


def rms_norm_bwd(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    impl: str,
    grad_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rms_norm` in fp32, rounded once; "triton" in one launch.

    Args:
        grad_y, x: [..., H]; weight: [H].
        grad_sum: [..., H], of the sum that `add_rms_norm` returns beside y; added to grad_x before
            the rounding.

    Returns:
        (grad_x [..., H] in the dtype of x, grad_weight [H] fp32).
    """
    _validate("rms_norm_bwd", x, weight, impl)
    for name, grad in (("grad_y", grad_y), ("grad_sum", grad_sum)):
        if grad is not None and grad.shape != x.shape:
            raise invalid("rms_norm_bwd", name, f"of shape {tuple(x.shape)}", tuple(grad.shape))
    if impl == "triton":
        from consistent_kernels.rms_norm import triton_bwd

        rows = None if grad_sum is None else _rows(grad_sum)
        grad_x, grad_weight = triton_bwd.rms_norm_bwd(_rows(grad_y), _rows(x), weight, eps, rows)
        return grad_x.view(x.shape), grad_weight
    return rms_norm_bwd_ref(grad_y.contiguous(), x, weight, eps, grad_sum)
