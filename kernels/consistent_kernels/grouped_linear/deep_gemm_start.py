"""The grouped shapes of a model, for `consistent_kernels.deep_gemm_start.prepare`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

from consistent_kernels.deep_gemm_start import (
    LARGEST_ROWS,
    check_rows,
    fill_operands,
    has_passed,
)
from consistent_kernels.grouped_linear.deep_gemm_grouped import grouped_gemm, is_served

_FEWEST_ROWS = 1024
"""Rows of a probe at first use: every tile below PIECES, and two pieces."""


@dataclasses.dataclass(frozen=True, order=True)
class GroupedShape:
    """Weights [G, N, K] of a layer that DeepGEMM serves.

    Attributes:
        groups, columns, inner: G, N, K.
        max_rows: the largest M to probe: what will be asked for, at most LARGEST_ROWS.
    """

    groups: int
    columns: int
    inner: int
    max_rows: int

    def operands(
        self, rows: int, device: torch.device, *, blank: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x [rows, G, K], weight [G, N, K] (`fill_operands`); any numbers where `blank`."""
        weight = torch.empty(
            (self.groups, self.columns, self.inner), dtype=torch.bfloat16, device=device
        )
        x = weight.new_empty((rows, self.groups, self.inner))
        if not blank:
            fill_operands(x, weight)
        return x, weight

    def run(self, operands: tuple[torch.Tensor, ...], rows: slice) -> torch.Tensor:
        """Return the library's result [rows, G, N] for these rows."""
        x, weight = operands
        part = x[rows]
        y = torch.empty((part.shape[0], self.groups, self.columns), dtype=x.dtype, device=x.device)
        grouped_gemm(part, weight, y)
        return y


@functools.cache
def start(groups: int, columns: int, inner: int, device: torch.device) -> None:
    """Probe weights [G, N, K] once, unless `deep_gemm_start.prepare` has.

    It waits for the device: the first call of a layer must not be captured in a graph.

    Raises:
        NumericsError: a row's bits follow the number of rows on this machine.
    """
    shape = GroupedShape(groups, columns, inner, _FEWEST_ROWS)
    if not has_passed(shape, device):
        check_rows(shape, device)


def layer_shapes(weights: Iterable[tuple[int, int, int]], rows: int) -> set[GroupedShape]:
    """Return what to prepare for weights [G, N, K], without those that the Triton kernel serves.

    Args:
        weights: (G, N, K) of each layer.
        rows: tokens of a step, at most.
    """
    most = min(rows, LARGEST_ROWS)
    return {GroupedShape(*sizes, most) for sizes in weights if is_served(*sizes[1:])}
