"""Rotary in Triton, elementwise: one program a (token, head)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned_rows
from consistent_kernels.rotary.spec import NUM_WARPS


# The launcher aligns every argument that Triton specializes on: it always specializes alike.
@triton.jit(
    do_not_specialize=["num_q_heads", "num_k_heads", "max_position"],
    do_not_specialize_on_alignment=["positions_ptr"],
)
def _rotary_fwd_kernel(
    positions_ptr,  # [T]
    q_ptr,  # [T, Hq, D], row stride q_stride
    k_ptr,  # [T, Hk, D], row stride k_stride
    cos_ptr,  # [P, HALF] fp32
    sin_ptr,  # [P, HALF] fp32
    q_out_ptr,  # [T, Hq, D] contiguous
    k_out_ptr,  # [T, Hk, D] contiguous
    q_stride,
    k_stride,
    num_q_heads,
    num_k_heads,
    max_position,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    is_q = head < num_q_heads
    k_head = head - num_q_heads
    column = tl.arange(0, BLOCK_HALF)
    inside = column < HALF
    position = tl.load(positions_ptr + token).to(tl.int64)
    # A padded graph row may hold any position and must not read outside the table; a real token
    # out there turns NaN, which no log-prob hides.
    known = inside & (position >= 0) & (position < max_position)
    cos = tl.load(cos_ptr + position * HALF + column, mask=known, other=float("nan"))
    sin = tl.load(sin_ptr + position * HALF + column, mask=known, other=float("nan"))
    if is_q:
        source = q_ptr + token * q_stride + head * D
        target = q_out_ptr + (token * num_q_heads + head) * D
    else:
        source = k_ptr + token * k_stride + k_head * D
        target = k_out_ptr + (token * num_k_heads + k_head) * D
    x1 = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF + column, mask=inside, other=0.0).to(tl.float32)
    dtype = q_out_ptr.dtype.element_ty
    tl.store(target + column, (x1 * cos - x2 * sin).to(dtype), mask=inside)
    tl.store(target + HALF + column, (x2 * cos + x1 * sin).to(dtype), mask=inside)
    if 2 * HALF < D:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        copied = tl.load(source + rest, mask=rest < D, other=0.0)
        tl.store(target + rest, copied, mask=rest < D)


def rotary_fwd(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; q [T, Hq, D] and k [T, Hk, D] may have strided rows."""
    tokens, num_q_heads, head_dim = q.shape
    num_k_heads, half = k.shape[1], cos_table.shape[1]
    q_rows, k_rows = (aligned_rows(x.reshape(tokens, x.shape[1] * head_dim)) for x in (q, k))
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if tokens:
        _rotary_fwd_kernel[(tokens, num_q_heads + num_k_heads)](
            positions,
            q_rows,
            k_rows,
            cos_table,
            sin_table,
            q_out,
            k_out,
            q_rows.stride(0),
            k_rows.stride(0),
            num_q_heads,
            num_k_heads,
            cos_table.shape[0],
            D=head_dim,
            HALF=half,
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
            num_warps=NUM_WARPS,
        )
    return q_out, k_out
