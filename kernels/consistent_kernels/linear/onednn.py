"""Linear by oneDNN's bf16 GEMM, for CPUs that multiply bf16 in hardware."""

from __future__ import annotations

import functools

import torch

from consistent_kernels.cpu_gemm import plain_gemms
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.linear.probe import probe_inputs, rows_per_call
from consistent_kernels.linear.reference import linear_ref
from consistent_kernels.linear.schedule import TILE_ROWS
from consistent_kernels.linear.tiles import linear_by_calls, row_calls


@functools.cache
def native_bf16() -> str | None:
    """Return this CPU's bf16 dot product, "amx" or "avx512_bf16", or None where it is emulated."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    return "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else None


def multiply_bf16(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write round(x W^T + b): one bf16 GEMM with fp32 accumulators, bias added to those.

    Args:
        x: [R, K]; weight: [N, K]; bias: [N] or None; out: [R, N]; all bf16.
    """
    with plain_gemms():
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)


def linear_onednn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y = round(x W^T + b) in calls of 16 rows, or of other sizes that gave the same bits.

    PyTorch's bf16 GEMM always rounds its result to bf16, so fp32 results (lm_head) are computed by
    the reference's tiles from an fp32 weight.

    Args:
        x: [T, K] bf16.
        weight: [N, K], fp32 where `out_dtype` is fp32, else bf16.
        bias: [N] bf16 or None.
        out_dtype: bf16 or fp32.

    Returns:
        [T, N] in `out_dtype`.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or native_bf16() is None:
        raise UnsupportedError(
            "linear (onednn)",
            f"{x.dtype} on {x.device.type} with native bf16 {native_bf16()}",
            ("torch.bfloat16 on a CPU with amx or avx512_bf16", "impl 'reference'"),
        )
    if out_dtype == torch.float32:
        return linear_ref(x, weight, bias, out_dtype)
    columns, inner = weight.shape
    sizes = rows_per_call(multiply_bf16, columns, inner, torch.bfloat16)
    return linear_by_calls(x, weight, bias, out_dtype, sizes=sizes, multiply=multiply_bf16)


def _multiply_packed(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [N, K] bf16 in oneDNN's own layout; `.to_dense()` gives it back."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, TILE_ROWS)


@functools.cache
def packed_rows(columns: int, inner: int) -> tuple[int, ...]:
    """Return the row counts whose packed calls give the bytes of the unpacked 16-row tile; cached.

    Empty where packing changes a bit of the tile itself: that shape is then not packed. Checked
    with and without a bias.
    """
    largest = max(rows_per_call(multiply_bf16, columns, inner, torch.bfloat16))
    x, weight = probe_inputs(max(largest, 4 * TILE_ROWS), columns, inner, torch.bfloat16)
    bias = x.flatten()[:inner].repeat(-(-columns // inner))[:columns].contiguous()
    packed = pack(weight)
    good = []
    for rows in rows_per_call(multiply_bf16, columns, inner, torch.bfloat16):
        checked = max(rows, TILE_ROWS)
        if all(_same_bytes(x[:checked], weight, packed, b, rows) for b in (None, bias)):
            good.append(rows)
    return tuple(good) if TILE_ROWS in good else ()


def _same_bytes(
    x: torch.Tensor,
    weight: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
) -> bool:
    expected = linear_by_calls(
        x, weight, bias, torch.bfloat16, sizes=(TILE_ROWS,), multiply=multiply_bf16
    )
    parts = [_multiply_packed(part, packed, bias) for part in x.split(rows)]
    return torch.equal(torch.cat(parts).view(torch.int16), expected.view(torch.int16))


def linear_packed_onednn(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y = round(x W^T + b), bit-equal to `linear_onednn` on the weight that was packed.

    Args:
        x: [T, K] bf16; packed: of `pack`, whose shape `packed_rows` admits; bias: [N] or None.

    Returns:
        [T, N] bf16.
    """
    columns, inner = packed.shape
    rows = x.shape[0]
    calls = row_calls(rows, packed_rows(columns, inner))
    if calls == ((0, rows),):
        return _multiply_packed(x.contiguous(), packed, bias)
    padded = calls[-1][0] + calls[-1][1] if calls else 0
    staged = x.contiguous()
    if padded != rows:
        staged = torch.zeros((padded, inner), dtype=x.dtype)
        staged[:rows] = x
    if len(calls) == 1:
        return _multiply_packed(staged, packed, bias)[:rows]
    out = torch.empty((padded, columns), dtype=x.dtype)
    for start, size in calls:
        part = slice(start, start + size)
        out[part] = _multiply_packed(staged[part], packed, bias)
    return out[:rows]
