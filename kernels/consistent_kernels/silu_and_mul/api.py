"""Public silu_and_mul: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.silu_and_mul.reference import silu_and_mul_bwd_ref, silu_and_mul_ref
from consistent_kernels.silu_and_mul.spec import IMPLEMENTATIONS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define("silu_and_mul(Tensor gate, Tensor up, str impl) -> Tensor")


def _validate(op: str, gate: torch.Tensor, up: torch.Tensor, impl: str) -> None:
    require_implementation(op, impl, IMPLEMENTATIONS)
    if gate.dim() != 2 or gate.dtype not in _DTYPES:
        raise invalid(
            op, "gate", "2-D bfloat16, float16 or float32", f"{gate.dim()}-D {gate.dtype}"
        )
    if up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device:
        raise invalid(
            op,
            "up",
            f"{gate.dtype} of shape {tuple(gate.shape)} on {gate.device}",
            f"{up.dtype} of shape {tuple(up.shape)} on {up.device}",
        )


def _silu_and_mul(gate: torch.Tensor, up: torch.Tensor, impl: str) -> torch.Tensor:
    count("silu_and_mul", impl)
    if impl == "reference":
        return silu_and_mul_ref(gate, up)
    if impl == "llvm":
        from consistent_kernels.silu_and_mul.llvm import silu_and_mul_llvm as forward
    else:
        from consistent_kernels.silu_and_mul.triton import silu_and_mul_fwd as forward
    return forward(gate, up)


_LIBRARY.impl("silu_and_mul", _silu_and_mul, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::silu_and_mul", lib=_LIBRARY)
def _(gate: torch.Tensor, up: torch.Tensor, impl: str) -> torch.Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor, *, impl: str) -> torch.Tensor:
    """y = round(silu(gate) * up), fp32 with one rounding.

    Source: Shazeer, arXiv 2002.05202 (SwiGLU). Eager Hugging Face code rounds silu(gate) first;
    this does not.

    Args:
        gate, up: [T, I], bf16, fp16 or fp32, same dtype; halves of one fused tensor are fine.
        impl: "reference" (any device), "llvm" (x86 CPUs, bf16 and fp32) or "triton" (CUDA).

    Returns:
        [T, I] contiguous, dtype of gate.

    Numerics:
        Elementwise: an element's bits depend on its two inputs alone.

    Raises:
        InvalidInputError: shape, dtype or device.
        UnsupportedError: unknown impl.
    """
    _validate("silu_and_mul", gate, up, impl)
    return torch.ops.consistent_kernels.silu_and_mul(gate, up, impl)


def silu_and_mul_bwd(
    grad_y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `silu_and_mul` in fp32, rounded once; "triton" in one launch.

    Args:
        grad_y, gate, up: [T, I].

    Returns:
        (grad_gate, grad_up), dtype of gate.
    """
    _validate("silu_and_mul_bwd", gate, up, impl)
    if impl == "triton":
        from consistent_kernels.silu_and_mul import triton_bwd

        return triton_bwd.silu_and_mul_bwd(grad_y, gate, up)
    return silu_and_mul_bwd_ref(grad_y, gate, up)
