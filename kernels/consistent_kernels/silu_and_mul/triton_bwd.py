"""Gradients of silu(gate) * up in Triton, elementwise: each tensor is read or written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned_rows

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _silu_and_mul_bwd_kernel(
    grad_y_ptr,  # [T, I], row stride grad_y_stride
    gate_ptr,  # [T, I], row stride gate_stride
    up_ptr,  # [T, I], row stride up_stride
    grad_gate_ptr,  # [T, I] contiguous
    grad_up_ptr,  # [T, I] contiguous
    grad_y_stride,
    gate_stride,
    up_stride,
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    grad_y = tl.load(grad_y_ptr + row * grad_y_stride + column, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), 1.0 + tl.exp(-gate))
    scaled = grad_y.to(tl.float32) * sigmoid
    grad_gate = scaled * up * (1.0 + gate * (1.0 - sigmoid))
    at = row * columns + column
    tl.store(grad_gate_ptr + at, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + at, (scaled * gate).to(grad_up_ptr.dtype.element_ty), mask=inside)


def silu_and_mul_bwd(
    grad_y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; formula and shapes as in `reference.silu_and_mul_bwd_ref`."""
    rows, columns = gate.shape
    grad_y, gate, up = aligned_rows(grad_y), aligned_rows(gate), aligned_rows(up)
    grad_gate, grad_up = (
        torch.empty((rows, columns), dtype=gate.dtype, device=gate.device) for _ in range(2)
    )
    if rows:
        _silu_and_mul_bwd_kernel[(rows, triton.cdiv(columns, _BLOCK))](
            grad_y,
            gate,
            up,
            grad_gate,
            grad_up,
            grad_y.stride(0),
            gate.stride(0),
            up.stride(0),
            columns,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return grad_gate, grad_up
