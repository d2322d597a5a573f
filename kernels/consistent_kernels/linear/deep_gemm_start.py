"""The bf16 GEMM shapes of a model, for DeepGEMM's start (`consistent_kernels.deep_gemm_start`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from consistent_kernels import deep_gemm_start
from consistent_kernels.deep_gemm_start import (
    LARGEST_ROWS,
    Shape,
    check_rows,
    fill_operands,
    probed_rows,
)
from consistent_kernels.linear.deep_gemm import gemm, is_served

__all__ = ["LARGEST_ROWS", "GemmShape", "check_rows", "prepare", "served_shapes"]


@dataclasses.dataclass(frozen=True, order=True)
class GemmShape:
    """One layer shape that DeepGEMM serves.

    Attributes:
        columns, inner: N, K.
        max_rows: the largest M to probe: what will be asked for, at most LARGEST_ROWS.
        out_fp32: whether the result is fp32 (lm_head) or bf16.
    """

    columns: int
    inner: int
    max_rows: int
    out_fp32: bool = False

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return torch.float32 if self.out_fp32 else torch.bfloat16

    def rows(self) -> list[int]:
        """Return the row counts to probe, ascending, `max_rows` included."""
        return probed_rows(self.max_rows)

    def operands(
        self, rows: int, device: torch.device, *, blank: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x [rows, K], weight [N, K] (`fill_operands`); uninitialized where `blank`."""
        weight = torch.empty((self.columns, self.inner), device=device, dtype=torch.bfloat16)
        x = weight.new_empty((rows, self.inner))
        if not blank:
            fill_operands(x, weight)
        return x, weight

    def run(self, operands: tuple[torch.Tensor, ...], rows: slice) -> torch.Tensor:
        """Return the library's result for these rows."""
        x, weight = operands
        part = x[rows]
        y = torch.empty((part.shape[0], self.columns), dtype=self.out_dtype, device=x.device)
        gemm(part, weight, y)
        return y


def served_shapes(shapes: Iterable[GemmShape]) -> set[Shape]:
    """Return the shapes that DeepGEMM serves; the Triton kernel serves the others."""
    return {s for s in shapes if is_served(s.columns, s.inner, False, s.out_dtype)}


def prepare(shapes: Iterable[GemmShape], device: torch.device, processes: int = 12) -> float:
    """`deep_gemm_start.prepare` of `served_shapes`."""
    return deep_gemm_start.prepare(served_shapes(shapes), device, processes)
