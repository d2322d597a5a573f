"""silu(gate) * up for x86 CPUs as one compiled loop, elementwise."""

from __future__ import annotations

import functools
from typing import Any

import torch

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.llvm import is_available
from consistent_kernels.llvm.commands import run_one
from consistent_kernels.llvm.kernel import I16, LANES, Kernel, floats

_DTYPES = (torch.bfloat16, torch.float32)


class SiluAndMul(Kernel):
    """The words of its command: see `command`."""

    def __init__(self, size: int, bits: int | None = None) -> None:
        super().__init__("silu_and_mul", bits)
        self.size, b = size, self.b
        gate, gate_stride, up, up_stride, out, rows, columns = self.words(1, 7)
        buffers = [self.scratch(LANES) for _ in range(3)]
        with self.work(rows) as row:
            at = [self.scaled(gate, row, gate_stride), self.scaled(up, row, up_stride)]
            at.append(self.scaled(out, row, b.mul(columns, self.i64(size))))
            whole = b.and_(columns, self.i64(-LANES))
            with self.loop(0, whole, LANES) as column:
                self._vector([self.scaled(base, column, size) for base in at])
            # The last columns pass through a buffer, so that they take the same instructions.
            with b.if_then(b.icmp_signed("<", whole, columns)):
                for base, buffer in zip(at[:2], buffers[:2], strict=True):
                    self._copy(self.scaled(base, whole, size), buffer, b.sub(columns, whole))
                self._vector(buffers)
                self._copy(buffers[2], self.scaled(at[2], whole, size), b.sub(columns, whole))

    def _copy(self, source: Any, target: Any, count: Any) -> None:
        halves = self.b.mul(count, self.i64(self.size // 2))
        with self.loop(0, halves) as i:
            self.store(self.load(self.scaled(source, i, 2), I16, 2), self.scaled(target, i, 2), 2)

    def _load(self, address: Any) -> Any:
        if self.size == 2:
            return self.load_bf16(address)
        return self.load(address, floats(LANES), 4)

    def _vector(self, at: list[Any]) -> None:
        b = self.b
        gate, up = self._load(at[0]), self._load(at[1])
        decay = self.exp(b.fneg(gate))
        silu = b.fdiv(gate, b.fadd(decay, self.fill(1.0)))
        y = b.fmul(silu, up)
        self.store(self.to_bf16(y) if self.size == 2 else y, at[2], self.size)


@functools.cache
def silu_and_mul_kernel(size: int) -> int:
    """Return the address of the kernel for bf16 (2 bytes) or fp32 (4)."""
    return SiluAndMul(size).compile()


def command(
    gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor
) -> tuple[int, tuple[int, ...], int]:
    """Return (kernel, words, units) that write round(silu(gate) * up) to `out`.

    Args:
        gate, up: [T, I] bf16 or fp32, contiguous columns; out: [T, I] contiguous.
    """
    rows, columns = gate.shape
    size = gate.element_size()
    words = (
        gate.data_ptr(),
        size * gate.stride(0),
        up.data_ptr(),
        size * up.stride(0),
        out.data_ptr(),
        rows,
        columns,
    )
    return silu_and_mul_kernel(size), words, rows


def silu_and_mul_llvm(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul_ref`, with this program's own exponential.

    Args:
        gate, up: [T, I] bf16 or fp32.

    Returns:
        [T, I] contiguous, dtype of gate.
    """
    if gate.dtype not in _DTYPES or gate.device.type != "cpu" or not is_available():
        raise UnsupportedError(
            "silu_and_mul (llvm)",
            f"{gate.dtype} on {gate.device.type}",
            (
                "torch.bfloat16 and torch.float32 on an x86-64 CPU with AVX2 and llvmlite",
                "impl 'reference'",
            ),
        )
    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype)
    if out.numel():
        run_one(*command(gate, up, out))
    return out
