"""Rotary in Triton, with the q and k norms before it where the model has them.

A program holds HEADS heads of one token. The norm is `rms_norm` to the bit: the same tree over the
row, the same roundings, so engine (fused) and trainer (norm, then rotary) agree. Contraction to fma
is off: with and without the norm, the compiler would fold other products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.rotary.spec import HEADS_PER_PROGRAM, NUM_WARPS
from consistent_kernels.triton_tree import halving_tree_columns


@triton.jit
def _inverse_rms(x1, x2, eps, HEADS: tl.constexpr, HALF: tl.constexpr, LEVELS: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of rows [x1, x2]; the tree begins by adding the halves."""
    square_sum = halving_tree_columns(x1 * x1 + x2 * x2, HEADS, HALF, LEVELS)
    mean = tl.div_rn(square_sum, tl.full((HEADS,), 2 * HALF, tl.float32))
    return tl.div_rn(tl.full((HEADS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))


# The launcher aligns every argument that Triton specializes on: it always specializes alike.
@triton.jit(
    do_not_specialize=["max_position", "eps"],
    do_not_specialize_on_alignment=["positions_ptr"],
)
def _rotary_fwd_kernel(
    positions_ptr,  # [T]
    q_ptr,  # [T, Hq, D], row stride q_stride
    k_ptr,  # [T, Hk, D], row stride k_stride
    q_weight_ptr,  # [D] or unused
    k_weight_ptr,  # [D] or unused
    cos_ptr,  # [P, HALF] fp32
    sin_ptr,  # [P, HALF] fp32
    q_out_ptr,  # [T, Hq, D] contiguous
    k_out_ptr,  # [T, Hk, D] contiguous
    q_stride,
    k_stride,
    max_position,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    LEVELS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    if block < q_blocks:
        first, heads = block * HEADS, Q_HEADS
        source, target = q_ptr + token * q_stride, q_out_ptr + token * (Q_HEADS * D)
        weight_ptr = q_weight_ptr
    else:
        first, heads = (block - q_blocks) * HEADS, K_HEADS
        source, target = k_ptr + token * k_stride, k_out_ptr + token * (K_HEADS * D)
        weight_ptr = k_weight_ptr
    head = first + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + token).to(tl.int64)
    # A padded graph row may hold any position and must not read outside the table; a real token
    # out there turns NaN, which no log-prob hides.
    known = (column < HALF) & (position >= 0) & (position < max_position)
    cos = tl.load(cos_ptr + position * HALF + column, mask=known, other=float("nan"))[None, :]
    sin = tl.load(sin_ptr + position * HALF + column, mask=known, other=float("nan"))[None, :]
    at = head * D + column[None, :]
    inside = (head < heads) & (column < HALF)[None, :]
    dtype = q_out_ptr.dtype.element_ty
    x1 = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        rstd = _inverse_rms(x1, x2, eps, HEADS, HALF, LEVELS)[:, None]
        w1 = tl.load(weight_ptr + column).to(tl.float32)[None, :]
        w2 = tl.load(weight_ptr + HALF + column).to(tl.float32)[None, :]
        x1 = (x1 * rstd * w1).to(dtype).to(tl.float32)
        x2 = (x2 * rstd * w2).to(dtype).to(tl.float32)
    tl.store(target + at, (x1 * cos - x2 * sin).to(dtype), mask=inside)
    tl.store(target + at + HALF, (x2 * cos + x1 * sin).to(dtype), mask=inside)
    if 2 * HALF < D:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (head < heads) & (rest < D)
        copied = tl.load(source + head * D + rest, mask=mask, other=0.0)
        tl.store(target + head * D + rest, copied, mask=mask)


def rotary_fwd(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_table: torch.Tensor,
    sin_table: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; q [T, Hq, D] and k [T, Hk, D] may have strided rows.

    Args:
        norm: (q weight [D], k weight [D], eps); D must be twice a power of two, all of it rotated.
    """
    tokens, q_heads, head_dim = q.shape
    k_heads, half = k.shape[1], cos_table.shape[1]
    q_rows, k_rows = (aligned_rows(x.reshape(tokens, x.shape[1] * head_dim)) for x in (q, k))
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q_weight, k_weight, eps = norm or (cos_table, cos_table, 0.0)
    block_half = 1 << (half - 1).bit_length()
    if tokens:
        blocks = sum(-(-heads // HEADS_PER_PROGRAM) for heads in (q_heads, k_heads))
        _rotary_fwd_kernel[(tokens, blocks)](
            positions.contiguous(),
            q_rows,
            k_rows,
            aligned(q_weight.contiguous()),
            aligned(k_weight.contiguous()),
            cos_table,
            sin_table,
            q_out,
            k_out,
            q_rows.stride(0),
            k_rows.stride(0),
            cos_table.shape[0],
            eps,
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            D=head_dim,
            HALF=half,
            HAS_NORM=norm is not None,
            HEADS=HEADS_PER_PROGRAM,
            BLOCK_HALF=block_half,
            BLOCK_REST=1 << (max(1, head_dim - 2 * half) - 1).bit_length(),
            LEVELS=block_half.bit_length() - 1,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    return q_out, k_out
