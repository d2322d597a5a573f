"""Public interleaved rotary: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.index_range import check_range
from consistent_kernels.interleaved_rotary.reference import interleaved_rotary_ref
from consistent_kernels.interleaved_rotary.spec import IMPLEMENTATIONS
from consistent_kernels.rotary.parameters import RopeParameters
from consistent_kernels.rotary.tables import rope_tables

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "interleaved_rotary(Tensor positions, Tensor x, str rope, bool inverse, str impl) -> Tensor"
)


def _interleaved_rotary(
    positions: torch.Tensor, x: torch.Tensor, rope: str, inverse: bool, impl: str
) -> torch.Tensor:
    count("interleaved_rotary", impl)
    cos, sin = rope_tables(rope, x.device)
    if impl == "reference":
        most = cos.shape[0]
        what = f"from 0 to rope.max_position - 1 = {most - 1}"
        check_range("interleaved_rotary", "positions", positions, 0, most, what)
        return interleaved_rotary_ref(positions, x, cos, sin, inverse)
    from consistent_kernels.interleaved_rotary.triton import interleaved_rotary_fwd

    return interleaved_rotary_fwd(positions, x, cos, sin, inverse)


_LIBRARY.impl("interleaved_rotary", _interleaved_rotary, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::interleaved_rotary", lib=_LIBRARY)
def _(
    positions: torch.Tensor, x: torch.Tensor, rope: str, inverse: bool, impl: str
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def interleaved_rotary(
    positions: torch.Tensor,
    x: torch.Tensor,
    *,
    rope: RopeParameters,
    inverse: bool = False,
    impl: str,
) -> torch.Tensor:
    """Rotate adjacent pairs of the last `rope.rotary_dim` columns of each head; copy the others.

    Source: DeepSeek's MLA. V3.2 rotates heads of 64 columns; V4 the last 64 of 512, and by the
    opposite angle the same columns of the attention's output (its value is its rotated key).

    Args:
        positions: [T] integers below rope.max_position.
        x: [T, heads, rope.head_dim], bf16, fp16 or fp32.
        inverse: rotate by the opposite angle. That is also the gradient of the other direction.
        impl: "reference" (any device) or "triton" (CUDA).

    Returns:
        [T, heads, rope.head_dim], dtype of x, contiguous.

    Numerics:
        Elementwise: bits depend on the element's own pair and position.

    Raises:
        InvalidInputError: shape or dtype; with "reference" also a position out of range.
        UnsupportedError: unknown impl.
    """
    op = "interleaved_rotary"
    require_implementation(op, impl, IMPLEMENTATIONS)
    if x.dim() != 3 or x.shape[2] != rope.head_dim or x.dtype not in _DTYPES:
        raise invalid(
            op,
            "x",
            f"[T, heads, {rope.head_dim}] of bfloat16, float16 or float32",
            f"{tuple(x.shape)} of {x.dtype}",
        )
    if positions.shape != x.shape[:1] or positions.dtype not in (torch.int32, torch.int64):
        raise invalid(
            op, "positions", f"{x.shape[0]} integers", f"{tuple(positions.shape)} {positions.dtype}"
        )
    return torch.ops.consistent_kernels.interleaved_rotary(positions, x, rope.key, inverse, impl)
