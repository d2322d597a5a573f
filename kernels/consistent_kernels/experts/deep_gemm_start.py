"""The grouped BF16 GEMM shapes of a model, for `consistent_kernels.deep_gemm_start.prepare`."""

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
from consistent_kernels.experts.deep_gemm_grouped import grouped_gemm, is_masked, is_served
from consistent_kernels.experts.deep_gemm_places import expert_places
from consistent_kernels.experts.deep_gemm_rows import from_places, to_places

_FEWEST_ROWS = 1024
"""Rows of a probe at first use: both layouts."""


@dataclasses.dataclass(frozen=True, order=True)
class GroupedGemmShape:
    """Stacked weights [E, N, K].

    Attributes:
        experts, columns, inner: E, N, K.
        max_rows: the most rows to probe, one slot each; above MASKED_TOKENS the contiguous layout
            is probed against the masked one, too.
    """

    experts: int
    columns: int
    inner: int
    max_rows: int

    def operands(
        self, rows: int, device: torch.device, *, blank: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Return x [rows, K], weight [E, N, K] (`fill_operands`), ids [rows, 1].

        x and weight are uninitialized where `blank`.
        """
        index = torch.arange(rows, dtype=torch.int32, device=device)
        # Every other row goes to the first quarter of the experts: counts are uneven.
        spread = index * 7 % self.experts
        ids = torch.where(index % 2 == 0, spread, spread // 4)[:, None]
        weight = torch.empty(
            (self.experts, self.columns, self.inner), dtype=torch.bfloat16, device=device
        )
        x = weight.new_empty((rows, self.inner))
        if not blank:
            fill_operands(x, weight)
        return x, weight, ids

    def run(self, operands: tuple[torch.Tensor, ...], rows: slice) -> torch.Tensor:
        """Return the result [rows, N] for these rows, in the layout that is served for so many."""
        x, weight, ids = operands
        mine = ids[rows].contiguous()
        masked = is_masked("fastest", mine.shape[0], self.experts)
        places = expert_places(mine, self.experts, masked=masked)
        return from_places(grouped_gemm(to_places(x[rows], places, 1), weight, places), places)


@functools.cache
def start(experts: int, columns: int, inner: int, device: torch.device) -> None:
    """Probe weights [E, N, K] once, unless `deep_gemm_start.prepare` has.

    It waits for the device: the first call of a layer must not be captured in a graph.

    Raises:
        NumericsError: a row's bits follow the number of rows or the layout on this machine.
    """
    shape = GroupedGemmShape(experts, columns, inner, _FEWEST_ROWS)
    if not has_passed(shape, device):
        check_rows(shape, device)


def layer_shapes(experts: int, hidden: int, width: int, rows: int) -> Iterable[GroupedGemmShape]:
    """Return the two shapes of a layer; none where the Triton kernel serves it.

    Args:
        experts, hidden, width: E, H and I.
        rows: tokens of a step times experts of a token, at most.
    """
    if not is_served(hidden, width):
        return ()
    most = min(rows, LARGEST_ROWS)
    return (
        GroupedGemmShape(experts, 2 * width, hidden, most),
        GroupedGemmShape(experts, hidden, width, most),
    )
