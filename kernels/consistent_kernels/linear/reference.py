"""Linear in plain PyTorch: the readable form of the spec, and the CPU program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from consistent_kernels.linear.probe import rows_per_call
from consistent_kernels.linear.schedule import TILE_COLUMNS, TILE_ROWS
from consistent_kernels.linear.tiles import linear_by_calls, multiply_fp32

_PROBED_COLUMNS = 4 * TILE_COLUMNS
_HALF = (torch.bfloat16, torch.float16)


def linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y = round(x W^T + b), in fp32 GEMMs [16, K] x [K, 64] only.

    Every GEMM has the same shape (a short tile is padded with zeros), so a row's bits cannot depend
    on the number of rows, nor a column's on the width. Calls have more or fewer rows where the
    start-up probe found the same bits.

    Args:
        x: [T, K].
        weight: [N, K] fp32, holding values of the model dtype (see `prepare_weight`).
        bias: [N] or None, added in fp32.
        out_dtype: dtype of the one rounding; fp32 rounds nothing.

    Returns:
        [T, N] in `out_dtype`.
    """
    columns, inner = weight.shape
    sizes: tuple[int, ...] = (TILE_ROWS,)
    if x.device.type == "cpu":
        # A column block is a GEMM of its own, so a few of them stand for all.
        sizes = rows_per_call(multiply_fp32, min(columns, _PROBED_COLUMNS), inner, torch.float32)
    return linear_by_calls(x, weight, bias, out_dtype, sizes=sizes, multiply=multiply_fp32)


def linear_bwd_ref(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    needs: tuple[bool, bool, bool],
    weight_dtype: torch.dtype = torch.float32,
    add_to: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """grad_x = g W, grad_weight = g^T x, grad_bias = sum over rows of g; fp32 accumulation.

    Args:
        grad_y: [T, N]; x: [T, K]; weight: [N, K] prepared.
        needs: which of (x, weight, bias) want a gradient.
        weight_dtype: dtype of grad_weight.
        add_to: [N, K] fp32 that grad_weight is added to.

    Returns:
        (grad_x [T, K] in the dtype of x, grad_weight [N, K], grad_bias [N] fp32).
    """
    grad_x = _product(grad_y, weight, x.dtype) if needs[0] else None
    grad_weight = add_to
    if needs[1] and add_to is not None:
        grad_weight = _add_product(add_to, grad_y.t(), x)
    elif needs[1]:
        grad_weight = _product(grad_y.t(), x, weight_dtype)
    grad_bias = grad_y.sum(0, dtype=torch.float32) if needs[2] else None
    return grad_x, grad_weight, grad_bias


def _on_tensor_cores(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_cuda and a.dtype == b.dtype and b.dtype in _HALF


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if _on_tensor_cores(a, b):
        return torch.addmm(total, a, b, out_dtype=torch.float32)
    return total.add_(_product(a, b, torch.float32))


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A B in fp32, rounded once; on tensor cores where CUDA can keep the accumulators.
    if _on_tensor_cores(a, b) and dtype == a.dtype:
        with _fp32_reductions():
            return torch.mm(a, b)
    if _on_tensor_cores(a, b):
        return torch.mm(a, b, out_dtype=torch.float32).to(dtype)
    if not a.is_cuda or b.dtype not in _HALF:
        return (a.float() @ b.float()).to(dtype)
    # The gradient of fp32 logits: its leading and following 8 bits, to 2^-16 of each factor.
    high = a.to(b.dtype)
    low = (a - high.float()).to(b.dtype)
    product = torch.mm(high, b, out_dtype=torch.float32)
    return product.add_(torch.mm(low, b, out_dtype=torch.float32)).to(dtype)


@contextlib.contextmanager
def _fp32_reductions() -> Iterator[None]:
    # By default cuBLAS may add partial sums of a split K in bf16.
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before[0]
        matmul.allow_fp16_reduced_precision_reduction = before[1]
