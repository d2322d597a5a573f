"""Public rotary: validate, take the named implementation, call it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from consistent_kernels.counters import count
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.rms_norm import rms_norm
from consistent_kernels.rotary.parameters import RopeParameters
from consistent_kernels.rotary.reference import rotary_ref
from consistent_kernels.rotary.spec import IMPLEMENTATIONS
from consistent_kernels.rotary.tables import rope_tables

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "rotary(Tensor positions, Tensor q, Tensor k, str rope, str impl) -> (Tensor, Tensor)"
)

_LIBRARY.define(
    "norm_rotary(Tensor positions, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, "
    "float eps, str rope, str impl) -> (Tensor, Tensor)"
)


def _validate(
    op: str,
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    rope: RopeParameters,
    impl: str,
) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 3 or x.shape[2] != rope.head_dim or x.dtype not in _DTYPES:
            raise invalid(
                op,
                name,
                f"[T, heads, {rope.head_dim}] of bfloat16, float16 or float32",
                f"{tuple(x.shape)} of {x.dtype}",
            )
    if q.shape[0] != k.shape[0] or q.dtype != k.dtype:
        raise invalid(op, "k", f"{q.shape[0]} rows of {q.dtype}", f"{k.shape[0]} of {k.dtype}")
    if positions.shape != q.shape[:1] or positions.is_floating_point():
        raise invalid(
            op,
            "positions",
            f"{q.shape[0]} integers",
            f"{tuple(positions.shape)} of {positions.dtype}",
            "Floating-point positions lose bits above 256 in bf16",
        )


def _rotary(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, rope: str, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    count("rotary", impl)
    cos, sin = rope_tables(rope, q.device)
    if impl == "reference":
        loops = _loops(q, cos.shape[1])
        return (loops.rotary_loop if loops else rotary_ref)(positions, q, k, cos, sin)
    from consistent_kernels.rotary.triton import rotary_fwd

    return rotary_fwd(positions, q, k, cos, sin)


@functools.cache
def _loops_module() -> Any:
    # Numba comes with vLLM; without it (or a place for its cache) the reference gives the same
    # bits, later.
    try:
        return importlib.import_module("consistent_kernels.rotary.loops")
    except (ImportError, RuntimeError):
        return None


def _loops(q: torch.Tensor, half: int) -> Any:
    """Return the compiled loops where they serve `q` with the reference's bits, else None."""
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return None
    module = _loops_module()
    return module if module is not None and module.has_reference_bits(q.shape[2], half) else None


def _is_fused(head_dim: int, half: int, impl: str) -> bool:
    # The kernel's tree over [x1, x2] is rms_norm's only where no column is padded or left over.
    return impl == "triton" and head_dim == 2 * half and half & (half - 1) == 0


def _norm_rotary(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    rope: str,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope_tables(rope, q.device)
    if not _is_fused(q.shape[2], cos.shape[1], impl):
        q = rms_norm(q, q_weight, eps, impl=impl)
        k = rms_norm(k, k_weight, eps, impl=impl)
        return _rotary(positions, q, k, rope, impl)
    count("rotary", impl)
    count("rms_norm", impl)
    from consistent_kernels.rotary.triton import rotary_fwd

    return rotary_fwd(positions, q, k, cos, sin, (q_weight, k_weight, eps))


_LIBRARY.impl("rotary", _rotary, "CompositeExplicitAutograd")
_LIBRARY.impl("norm_rotary", _norm_rotary, "CompositeExplicitAutograd")


def _outputs_like(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(k.shape, dtype=k.dtype, device=k.device),
    )


@torch.library.register_fake("consistent_kernels::rotary", lib=_LIBRARY)
def _(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, rope: str, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs_like(q, k)


@torch.library.register_fake("consistent_kernels::norm_rotary", lib=_LIBRARY)
def _(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs_like(q, k)


def rotary(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    rope: RopeParameters,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the halves (neox style) of each head's first rotary_dim columns.

    y1 = round(x1 cos - x2 sin), y2 = round(x2 cos + x1 sin); tables and arithmetic in fp32, one
    rounding. Source: Su et al., arXiv 2104.09864. The tables live inside the op, so no
    caller's cast (autocast, FSDP's input casting) reaches them.

    Args:
        positions: [T] int32 or int64, position of each token inside its request, below
            `rope.max_position` (beyond it "reference" raises IndexError, "triton" gives NaN).
        q: [T, Hq, D]; k: [T, Hk, D], bf16, fp16 or fp32; rows may be strided.
        rope: the tables' parameters.
        impl: "reference" (any device) or "triton" (CUDA).

    Returns:
        (q, k) rotated, contiguous, dtypes unchanged.

    Numerics:
        Elementwise: bits depend on the element's own pair and position.

    Raises:
        InvalidInputError: shape or dtype.
        UnsupportedError: unknown impl.
    """
    _validate("rotary", positions, q, k, rope, impl)
    return torch.ops.consistent_kernels.rotary(positions, q, k, rope.key, impl)


def norm_rotary(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    *,
    rope: RopeParameters,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rotary(positions, rms_norm(q), rms_norm(k)): one launch in "triton", the bits of the three.

    Source: Qwen3's q and k norms (vllm/model_executor/models/qwen3.py). Heads that are not twice a
    power of two wide, or rotate only in part, take the three launches.

    Args:
        positions, q, k, rope, impl: as in `rotary`.
        q_weight, k_weight: [D] norm weights, any float dtype.
        eps: of both norms, fp32.

    Returns, Raises: as `rotary`.
    """
    _validate("norm_rotary", positions, q, k, rope, impl)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.shape != q.shape[2:]:
            raise invalid(
                "norm_rotary", name, f"of shape {tuple(q.shape[2:])}", tuple(weight.shape)
            )
    return torch.ops.consistent_kernels.norm_rotary(
        positions, q, k, q_weight, k_weight, eps, rope.key, impl
    )


def rotary_bwd(
    positions: torch.Tensor,
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    *,
    rope: RopeParameters,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rotary`: the rotation by the opposite angle (its transpose), rounded once.

    Args:
        positions: [T]; grad_q: [T, Hq, D]; grad_k: [T, Hk, D].

    Returns:
        (grad of q, grad of k), dtypes unchanged.
    """
    _validate("rotary_bwd", positions, grad_q, grad_k, rope, impl)
    cos, sin = rope_tables(rope, grad_q.device)
    if impl == "triton":
        from consistent_kernels.rotary.triton import rotary_fwd

        return rotary_fwd(positions, grad_q, grad_k, cos, -sin)
    return rotary_ref(positions, grad_q, grad_k, cos, -sin)
