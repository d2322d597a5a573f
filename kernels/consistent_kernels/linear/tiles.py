"""The one GEMM shape of the CPU program, and how rows are cut into calls."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from consistent_kernels.cpu_gemm import plain_gemms
from consistent_kernels.linear.schedule import TILE_COLUMNS, TILE_ROWS

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]
"""(x [R, K], weight [N, K], bias [N] or None, out [R, N]): writes round(x W^T + b) to out."""


def multiply_fp32(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write round(x W^T + b): one fp32 GEMM [R, K] x [K, 64] for every 64 columns.

    A library GEMM chooses its kernel, its order of additions and its split among threads from the
    whole shape. Blocks of one shape give a column the same bits whatever stands beside it. They
    run as one batched call.

    Args:
        x: [R, K] fp32 contiguous; weight: [N, K] fp32 contiguous; bias: [N] or None.
        out: [R, N], any float dtype.
    """
    columns, inner = weight.shape
    rest = columns % TILE_COLUMNS
    whole = columns - rest
    if whole:
        _multiply_blocks(x, weight[:whole], None if bias is None else bias[:whole], out[:, :whole])
    if rest:
        # A narrower block would be another shape, and other bits on some CPUs.
        last = weight.new_zeros((TILE_COLUMNS, inner))
        last[:rest] = weight[whole:]
        product = x.new_empty((x.shape[0], TILE_COLUMNS))
        _multiply_blocks(x, last, None, product)
        product = product[:, :rest]
        out[:, whole:] = product if bias is None else product + bias[whole:].float()


def _multiply_blocks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    blocks = weight.view(-1, TILE_COLUMNS, weight.shape[1]).transpose(1, 2)
    count = blocks.shape[0]
    # MKL cuts a GEMM that is alone along K, by the number of threads; of several, each is whole.
    batch = max(count, 2)
    with plain_gemms():
        product = torch.bmm(x.expand(batch, *x.shape), blocks.expand(batch, -1, -1))[:count]
    if bias is not None:
        product += bias.float().view(count, 1, TILE_COLUMNS)
    out.view(x.shape[0], count, TILE_COLUMNS).copy_(product.transpose(0, 1))


@functools.lru_cache(maxsize=4096)
def row_calls(rows: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (start, size) of calls that cover `rows` rows, the last one possibly beyond the end.

    Args:
        rows: number of rows.
        sizes: allowed rows of a call, ascending, TILE_ROWS among them.
    """
    start = 0
    calls = []
    while start < rows:
        rest = rows - start
        if rest <= TILE_ROWS:
            size = min(size for size in sizes if size >= rest)
        else:
            size = max(size for size in sizes if size <= rest)
        calls.append((start, size))
        start += size
    return tuple(calls)


def linear_by_calls(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    sizes: tuple[int, ...],
    multiply: Multiply,
) -> torch.Tensor:
    """y = round(x W^T + b) by calls of `multiply` on the row counts in `sizes`.

    Args:
        x: [T, K]; weight: [N, K], whose dtype is the one x is multiplied in; bias: [N] or None.
        out_dtype: dtype of the result.
        sizes: rows a call may have; a short call is padded with zero rows.

    Returns:
        [T, N] in `out_dtype`, contiguous.
    """
    rows, inner = x.shape
    calls = row_calls(rows, sizes)
    padded = calls[-1][0] + calls[-1][1] if calls else 0
    if padded == rows:
        staged = x.to(weight.dtype).contiguous()
    else:
        staged = torch.zeros((padded, inner), dtype=weight.dtype, device=x.device)
        staged[:rows] = x
    out = torch.empty((padded, weight.shape[0]), dtype=out_dtype, device=x.device)
    if len(calls) == 1:
        multiply(staged, weight, bias, out)
    else:
        for start, size in calls:
            part = slice(start, start + size)
            multiply(staged[part], weight, bias, out[part])
    return out if padded == rows else out[:rows]
