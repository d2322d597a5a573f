"""The post map in Triton: a sublayer's output back onto the streams."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned, aligned_rows
from consistent_kernels.hyper_connections.spec import PostSchedule, post_schedule


# The launcher aligns every argument that Triton specializes on: it always specializes alike.
@triton.jit
def _hc_post_fwd_kernel(
    y_ptr,  # [T, H], row stride y_stride
    x_ptr,  # [T, S, H], token stride x_stride
    post_ptr,  # [T, S] fp32
    comb_ptr,  # [T, S, S] fp32
    out_ptr,  # [T, S, H] contiguous
    y_stride,
    x_stride,
    H: tl.constexpr,
    S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    BLOCKS: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    # Programs beside each other share a token: they read and write what lies together.
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = tl.program_id(0) % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = columns < H
    streams = tl.arange(0, S)
    y = tl.load(y_ptr + token * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(post_ptr + token * S + streams)[:, None] * y[None, :]
    for stream in tl.static_range(S):
        weight = tl.load(comb_ptr + (token * S + stream) * S + streams)
        x = tl.load(x_ptr + token * x_stride + stream * H + columns, mask=inside, other=0.0)
        total += weight[:, None] * x.to(tl.float32)[None, :]
    out = out_ptr + (token * S + streams)[:, None] * H + columns[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside[None, :])


def hc_post_fwd(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    schedule: PostSchedule | None = None,
) -> torch.Tensor:
    """Launch out_j = post_j y + sum_i comb_ij x_i; returns [T, S, H]."""
    tokens, streams, hidden = x.shape
    schedule = schedule or post_schedule(tokens)
    out = torch.empty((tokens, streams, hidden), dtype=x.dtype, device=x.device)
    if tokens:
        flat, rows = aligned_rows(x.flatten(1)), aligned_rows(y)
        _hc_post_fwd_kernel[(tokens * triton.cdiv(hidden, schedule.hidden_block),)](
            rows, flat, aligned(post.contiguous()), aligned(comb.contiguous()), out,
            rows.stride(0), flat.stride(0), H=hidden, S=streams, BLOCK_H=schedule.hidden_block,
            num_warps=schedule.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out
