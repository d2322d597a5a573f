"""RMSNorm of bf16 rows as a kernel for a list of commands: the reference's bits.

The same products, sums (the halving tree of `reference._rstd`), root and division, each rounded as
there; a probe at first use compares the bytes.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import torch
from llvmlite import ir

from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import F32, I32, LANES, Kernel, floats
from consistent_kernels.rms_norm.reference import add_rms_norm_ref, rms_norm_ref

_PROBED_ROWS = 64


def square_tree(kernel: Kernel, squares: Any, size: int) -> Any:
    """Halving tree over `size` fp32 at an address, which it overwrites; see `reference._rstd`.

    Args:
        size: a multiple of 16, at least 32.
    """
    half = 1 << (size - 1).bit_length() >> 1
    spans = []
    if half < size < 2 * half:
        spans.append((half, size - half))
        half //= 2
    while half >= LANES:
        spans.append((half, half))
        half //= 2
    for distance, count in spans:
        with kernel.loop(0, count, LANES) as j:
            low = kernel.scaled(squares, j, 4)
            total = kernel.b.fadd(
                kernel.load(low, floats(LANES), 4),
                kernel.load(kernel.at(low, 4 * distance), floats(LANES), 4),
            )
            kernel.store(total, low, 4)
    return kernel.sum(kernel.load(squares, floats(LANES), 4))


def inverse_rms(kernel: Kernel, squares: Any, size: int, eps: Any) -> Any:
    """1 / sqrt(mean + eps), a scalar, from the squares at an address."""
    b = kernel.b
    mean = b.fdiv(square_tree(kernel, squares, size), ir.Constant(F32, float(size)))
    root = kernel.intrinsic("llvm.sqrt.f32", F32, b.fadd(mean, eps))
    return b.fdiv(ir.Constant(F32, 1.0), root)


class _RmsNorm(Kernel):
    """The words of its command: see `command`."""

    def __init__(self, size: int, adds: bool) -> None:
        super().__init__("rms_norm")
        b = self.b
        x, x_stride, residual, weight, out, total, rows, eps = self.words(1, 8)
        eps = b.bitcast(b.trunc(eps, I32), F32)
        values, squares = self.scratch(size), self.scratch(size)
        with self.work(rows) as row:
            x = self.scaled(x, row, x_stride)
            residual, out, total = (
                self.scaled(base, row, 2 * size) for base in (residual, out, total)
            )
            with self.loop(0, size, LANES) as j:
                value = self.load_bf16(self.scaled(x, j, 2))
                if adds:
                    value = b.fadd(value, self.load_bf16(self.scaled(residual, j, 2)))
                    bits = self.to_bf16(value)
                    self.store(bits, self.scaled(total, j, 2), 2)
                    value = self.widen(bits)
                self.store(value, self.scaled(values, j, 4), 4)
                self.store(b.fmul(value, value), self.scaled(squares, j, 4), 4)
            scale = self.splat(inverse_rms(self, squares, size, eps))
            with self.loop(0, size, LANES) as j:
                value = self.load(self.scaled(values, j, 4), floats(LANES), 4)
                w = self.load_bf16(self.scaled(weight, j, 2))
                y = b.fmul(b.fmul(value, scale), w)
                self.store(self.to_bf16(y), self.scaled(out, j, 2), 2)


@functools.cache
def rms_norm_kernel(size: int, adds: bool) -> int:
    """Return the address of the kernel for rows of `size`."""
    return _RmsNorm(size, adds).compile()


def float_word(value: float) -> int:
    """Return the bits of an fp32 number, as a word of a command."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def command(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> tuple[int, tuple[int, ...], int]:
    """Return (kernel, words, units) that write rms_norm(x), or s = x + residual and rms_norm(s).

    Args:
        x: [T, H] bf16, rows may be strided.
        residual, out, total: [T, H] bf16 contiguous; residual and total both or neither. `total`
            may be residual.
        weight: [H] bf16.
    """
    rows, size = x.shape
    words = (
        x.data_ptr(),
        2 * x.stride(0),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        0 if total is None else total.data_ptr(),
        rows,
        float_word(eps),
    )
    return rms_norm_kernel(size, residual is not None), words, rows


@functools.cache
def has_reference_bits(size: int) -> bool:
    """Return whether the kernel serves rows of `size` with the reference's bytes; cached."""
    if size % LANES or size < 2 * LANES:
        return False
    angles = torch.arange(2 * _PROBED_ROWS * size, dtype=torch.float64).view(2, _PROBED_ROWS, size)
    # Magnitudes over eight powers of two, so that the order of the sum shows.
    values = (torch.sin(angles * math.pi * 0.7071) * 2.0 ** (angles % 8 - 4)).bfloat16()
    weight = (1 + 0.2 * torch.cos(angles[0, 0])).bfloat16()
    x, residual = values[0].contiguous(), values[1].contiguous()
    out, total, alone = (torch.empty_like(x) for _ in range(3))
    run_one(*command(x, residual, weight, 1e-5, out, total))
    run_one(*command(x, None, weight, 1e-6, alone, None))
    expected = (*add_rms_norm_ref(x, residual, weight, 1e-5), rms_norm_ref(x, weight, 1e-6))
    return all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for a, b in zip((out, total, alone), expected, strict=True)
    )
