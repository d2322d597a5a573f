"""Start-up probe of an FP8 GEMM whose tile follows the number of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from consistent_kernels.fp8_linear.spec import BLOCK_K

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""x [M, K] float8, x_scale [M, K / 128], weight [N, K] float8, weight_scale [N / 128, K / 128]."""

_DISTINCT_ROWS = 257


def _hash(rows: int, columns: int, salt: int, device: torch.device) -> torch.Tensor:
    # Integer hashing: the same numbers on every device and library.
    index = torch.arange(rows * columns, dtype=torch.int64, device=device).view(rows, columns)
    bits = ((index + salt * 7919) * 2654435761) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 2246822519) & 0xFFFFFFFF
    return bits >> 8


def _values(rows: int, columns: int, salt: int, device: torch.device) -> torch.Tensor:
    # Rows repeat: hashing a large weight at once would take gigabytes.
    distinct = min(rows, _DISTINCT_ROWS)
    bits = _hash(distinct, columns, salt, device)
    magnitude = bits % 0x7F  # every finite one, 0x7f being NaN
    values = (magnitude | (bits >> 8 & 1) << 7).to(torch.uint8)
    return values.repeat(-(-rows // distinct), 1)[:rows].view(torch.float8_e4m3fn)


def _scales(rows: int, columns: int, salt: int, device: torch.device) -> torch.Tensor:
    exponents = 127 - _hash(rows, columns, salt, device) % 12
    return (exponents << 23).to(torch.int32).view(torch.float32)


def probe_operands(rows: int, columns: int, inner: int, device: torch.device) -> Operands:
    """Return operands whose results show the order of additions, the same on every machine.

    The second half of K cancels the first in exact arithmetic (the middle block of an odd number of
    blocks is left), so what is left of a row is the error of its additions; powers of two as scales
    are right for either scale format.

    Args:
        rows: M; columns: N; inner: K, a multiple of 128.
    """
    blocks, half = inner // BLOCK_K, inner // BLOCK_K // 2
    x, weight = _values(rows, inner, 1, device), _values(columns, inner, 2, device)
    x_scale = _scales(rows, blocks, 3, device)
    weight_scale = _scales(-(-columns // BLOCK_K), blocks, 4, device)
    first, last = slice(0, half * BLOCK_K), slice(inner - half * BLOCK_K, inner)
    x_bits, weight_bits = x.view(torch.uint8), weight.view(torch.uint8)
    x_bits[:, last] = x_bits[:, first].flip(1)
    weight_bits[:, last] = weight_bits[:, first].flip(1) ^ 0x80
    for scale in (x_scale, weight_scale):
        scale[:, blocks - half :] = scale[:, :half].flip(1)
    return x, x_scale, weight, weight_scale


def rows_that_differ(
    run: Callable[[Operands], torch.Tensor], operands: Operands, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the sizes whose calls give some row other bytes than one call of all rows.

    Args:
        run: the GEMM.
        operands: of as many rows as the largest call.
        sizes: rows a call; each is tried at the first and at the last rows.
    """
    x, x_scale, weight, weight_scale = operands
    whole = run(operands)
    rows = x.shape[0]
    differ = []
    for size in sizes:
        for start in {0, rows - size}:
            part = slice(start, start + size)
            some = run((x[part], x_scale[part], weight, weight_scale))
            same = torch.equal(some.view(torch.uint8), whole[part].view(torch.uint8))
            if not same:
                differ.append(size)
                break
    return tuple(differ)
