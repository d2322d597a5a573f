"""Attention for x86 CPUs by the compiled loop of `llvm_kernel.py`."""

from __future__ import annotations

import functools
import math
import struct

import torch

from consistent_kernels.attention.llvm_kernel import STATE, Attention
from consistent_kernels.attention.plan import AttentionPlan
from consistent_kernels.attention.spec import KEY_TILE
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.llvm import is_available
from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import LANES

_NO_WINDOW = 1 << 40


@functools.cache
def attention_kernel(head_dim: int, group: int, run: int = LANES) -> int:
    """Return the address of the kernel for pages of a multiple of `run` keys."""
    return Attention(head_dim, group, run=run).compile()


def check_operands(q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise UnsupportedError where this program does not serve q [T, Hq, D] and k."""
    served = q.dtype == k.dtype == torch.bfloat16 and q.device.type == "cpu" and is_available()
    if not served or q.shape[2] % LANES:
        raise UnsupportedError(
            "attention (llvm)",
            f"{q.dtype} and {k.dtype} of head dim {q.shape[2]} on {q.device.type}",
            (
                f"bfloat16 with a head dim that is a multiple of {LANES} on an x86-64 CPU with "
                "AVX2 and llvmlite",
                "impl 'reference'",
            ),
        )


def command(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    plan: AttentionPlan,
    out: torch.Tensor,
    stats: torch.Tensor | None,
) -> tuple[int, tuple[int, ...], int]:
    """Return (kernel, words, units) that write attention to `out`.

    Args:
        q: [T, Hq, D] bf16, heads side by side; k_rows, v_rows: [rows, Hk, D] of equal strides.
        plan: made with `impl="llvm"`; must outlive the command, as all tensors must.
        out: [T, Hq, D] bf16, heads side by side.
        stats: [T, Hq, 2] fp32 for (maximum, row sum), or None.
    """
    params, batch = plan.params, plan.batch
    assert batch is not None
    words = (
        batch.items.data_ptr(),
        batch.items.shape[0],
        q.data_ptr(),
        2 * q.stride(0),
        k_rows.data_ptr(),
        v_rows.data_ptr(),
        2 * k_rows.stride(0),
        batch.starts.data_ptr(),
        batch.lengths.data_ptr(),
        batch.table.data_ptr(),
        batch.table.stride(0),
        batch.block_size,
        plan.block_rows,
        params.num_kv_heads,
        out.data_ptr(),
        2 * out.stride(0),
        0 if stats is None else stats.data_ptr(),
        params.sliding_window or _NO_WINDOW,
        params.key_split // KEY_TILE,
        struct.unpack("<i", struct.pack("<f", params.scale))[0],
    )
    units = batch.items.shape[0] * params.num_kv_heads
    run = math.gcd(batch.block_size, LANES)
    return attention_kernel(params.head_dim, params.group, run), words, units


def attention_llvm(
    q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v over the keys that each query sees; see `attention_ref`.

    Args:
        q: [T, Hq, D]; k_rows, v_rows: [rows, Hk, D]; bf16.
        plan: from `plan_attention(..., impl="llvm")`.

    Returns:
        (out [T, Hq, D] bf16, lse [T, Hq] fp32).
    """
    check_operands(q, k_rows)
    q, k_rows, v_rows = (_side_by_side(x) for x in (q, k_rows, v_rows))
    if k_rows.stride(0) != v_rows.stride(0):
        k_rows, v_rows = k_rows.contiguous(), v_rows.contiguous()
    out = torch.zeros(q.shape, dtype=q.dtype)
    stats = torch.zeros((*q.shape[:2], STATE), dtype=torch.float32)
    kernel, words, units = command(q, k_rows, v_rows, plan, out, stats)
    if units:
        run_one(kernel, words, units)
    # An untouched row has a sum of 0, and so lse -inf.
    return out, stats[..., 1].log().add_(stats[..., 0])


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
