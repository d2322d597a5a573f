"""Public interleaved rotary: validate, take the named implementation, call it."""

from __future__ import annotations

import torch

from consistent_kernels.counters import count
from consistent_kernels.devices import require_cuda, require_device
from consistent_kernels.errors import invalid, require_implementation
from consistent_kernels.index_range import check_range
from consistent_kernels.interleaved_rotary.reference import (
    interleaved_rotary_in_place_ref,
    interleaved_rotary_ref,
)
from consistent_kernels.interleaved_rotary.spec import IMPLEMENTATIONS
from consistent_kernels.rotary.parameters import RopeParameters
from consistent_kernels.rotary.tables import rope_tables

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("consistent_kernels", "FRAGMENT")
_LIBRARY.define(
    "interleaved_rotary(Tensor positions, Tensor x, str rope, bool inverse, str impl) -> Tensor"
)
_LIBRARY.define(
    "interleaved_rotary_(Tensor positions, Tensor(a!) x, str rope, bool inverse, str impl) -> ()"
)


def _tables(
    positions: torch.Tensor, x: torch.Tensor, rope: str, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    count("interleaved_rotary", impl)
    cos, sin = rope_tables(rope, x.device)
    if impl == "reference":
        most = cos.shape[0]
        what = f"from 0 to rope.max_position - 1 = {most - 1}"
        check_range("interleaved_rotary", "positions", positions, 0, most, what)
    else:
        require_cuda("interleaved_rotary", impl, x)
    return cos, sin


def _interleaved_rotary(
    positions: torch.Tensor, x: torch.Tensor, rope: str, inverse: bool, impl: str
) -> torch.Tensor:
    cos, sin = _tables(positions, x, rope, impl)
    if impl == "reference":
        return interleaved_rotary_ref(positions, x, cos, sin, inverse)
    from consistent_kernels.interleaved_rotary.triton import interleaved_rotary_fwd

    return interleaved_rotary_fwd(positions, x, cos, sin, inverse)


def _interleaved_rotary_in_place(
    positions: torch.Tensor, x: torch.Tensor, rope: str, inverse: bool, impl: str
) -> None:
    cos, sin = _tables(positions, x, rope, impl)
    if impl == "reference":
        interleaved_rotary_in_place_ref(positions, x, cos, sin, inverse)
        return
    # Here and not in the public function: a compiled graph's tensors have no address.
    if x.data_ptr() % 16:
        given = f"address {x.data_ptr():#x}"
        raise invalid("interleaved_rotary_", "x", "aligned to 16 bytes", given)
    from consistent_kernels.interleaved_rotary.triton import interleaved_rotary_in_place

    interleaved_rotary_in_place(positions, x, cos, sin, inverse)


_LIBRARY.impl("interleaved_rotary", _interleaved_rotary, "CompositeExplicitAutograd")
_LIBRARY.impl("interleaved_rotary_", _interleaved_rotary_in_place, "CompositeExplicitAutograd")


@torch.library.register_fake("consistent_kernels::interleaved_rotary", lib=_LIBRARY)
def _(
    positions: torch.Tensor, x: torch.Tensor, rope: str, inverse: bool, impl: str
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.register_fake("consistent_kernels::interleaved_rotary_", lib=_LIBRARY)
def _(positions: torch.Tensor, x: torch.Tensor, rope: str, inverse: bool, impl: str) -> None:
    return None


def _check(
    op: str, positions: torch.Tensor, x: torch.Tensor, rope: RopeParameters, impl: str
) -> None:
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
    require_device(op, x.device, positions=positions)


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
    _check("interleaved_rotary", positions, x, rope, impl)
    return torch.ops.consistent_kernels.interleaved_rotary(positions, x, rope.key, inverse, impl)


def interleaved_rotary_(
    positions: torch.Tensor,
    x: torch.Tensor,
    *,
    rope: RopeParameters,
    inverse: bool = False,
    impl: str,
) -> torch.Tensor:
    """`interleaved_rotary`, written over the last `rope.rotary_dim` columns of x; equal bits.

    For an engine, which keeps nothing for a backward: only the columns that turn are read and
    written (64 of V4's 512). No gradient passes through it.

    Args:
        x: as there, each head's columns contiguous; with "triton" tokens and heads start at
            multiples of 16 elements. No two of its elements may share memory.

    Returns:
        x.

    Raises:
        InvalidInputError: as there; also a layout of x that cannot be turned in place, or an x
            that requires a gradient.
    """
    op = "interleaved_rotary_"
    _check(op, positions, x, rope, impl)
    if x.requires_grad and torch.is_grad_enabled():
        raise invalid(op, "x", "without a gradient (use interleaved_rotary)", "requires_grad=True")
    aligned = all(stride % 16 == 0 for stride in x.stride()[:2])
    if x.stride(2) != 1 or 0 in x.stride() or (impl == "triton" and not aligned):
        raise invalid(
            op,
            "x",
            "with contiguous columns, tokens and heads at multiples of 16 elements",
            f"strides {x.stride()}",
        )
    torch.ops.consistent_kernels.interleaved_rotary_(positions, x, rope.key, inverse, impl)
    return x
