"""silu(gate) * up in Triton, elementwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from consistent_kernels.alignment import aligned_rows
from consistent_kernels.silu_and_mul.spec import BLOCK, NUM_WARPS


# The launcher aligns every argument that Triton specializes on: it always specializes alike.
@triton.jit
def _silu_and_mul_fwd_kernel(
    gate_ptr,  # [T, I], row stride gate_stride
    up_ptr,  # [T, I], row stride up_stride
    y_ptr,  # [T, I] contiguous
    gate_stride,
    up_stride,
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    tl.store(y_ptr + row * columns + column, (silu * up).to(y_ptr.dtype.element_ty), mask=inside)


def silu_and_mul_fwd(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Launch the kernel; gate and up are [T, I]."""
    rows, columns = gate.shape
    gate, up = aligned_rows(gate), aligned_rows(up)
    y = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device)
    if rows:
        _silu_and_mul_fwd_kernel[(rows, -(-columns // BLOCK))](
            gate, up, y, gate.stride(0), up.stride(0), columns, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return y
