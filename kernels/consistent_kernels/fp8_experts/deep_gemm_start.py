"""The grouped FP8 GEMM shapes of a model, for `consistent_kernels.deep_gemm_start.prepare`."""

from __future__ import annotations

import dataclasses
import functools

import torch

from consistent_kernels.deep_gemm_start import LARGEST_ROWS, check_rows, has_passed
from consistent_kernels.experts.deep_gemm_places import AnyPlaces, expert_places
from consistent_kernels.experts.deep_gemm_rows import from_places
from consistent_kernels.fp8_experts.deep_gemm_grouped import grouped_gemm, is_masked, is_packed
from consistent_kernels.fp8_experts.deep_gemm_packed import PACKED_ROWS, pack
from consistent_kernels.fp8_experts.deep_gemm_rows import to_places
from consistent_kernels.fp8_linear.deep_gemm import Fp8GemmShape
from consistent_kernels.fp8_linear.probe import Operands

_FEWEST_ROWS = 2 * PACKED_ROWS
"""Rows of a probe at first use: every layout that is served."""


@dataclasses.dataclass(frozen=True, order=True)
class Fp8GroupedGemmShape:
    """Stacked weights [E, N, K].

    Attributes:
        experts, columns, inner: E, N, K.
        max_rows: the most rows to probe, one slot each; above PACKED_ROWS the layouts of few and
            of many rows are probed against each other, too.
        scale_format: "fp32" or "ue8m0".
    """

    experts: int
    columns: int
    inner: int
    max_rows: int
    scale_format: str

    def operands(self, rows: int, device: torch.device, *, blank: bool = False) -> Operands:
        """Return `probe_operands` of this shape, the weights of all experts below each other."""
        every = self.experts * self.columns
        dense = Fp8GemmShape(every, self.inner, self.max_rows, self.scale_format)
        return dense.operands(rows, device, blank=blank)

    def run(self, operands: Operands, rows: slice) -> torch.Tensor:
        """Return the library's result for these rows, in the layout that is served for so many.

        Every other row goes to few experts.
        """
        values, scale, weight, weight_scale = operands
        index = torch.arange(values.shape[0], dtype=torch.int32, device=values.device)
        spread = index * 7 % self.experts
        ids = torch.where(index % 2 == 0, spread, spread // 4)[rows, None].contiguous()
        stacked = (
            weight.view(self.experts, self.columns, self.inner),
            weight_scale.view(self.experts, -1, weight_scale.shape[1]),
        )
        if is_packed("fastest", ids.numel(), self.experts, ids.device):
            places: AnyPlaces = pack(ids, self.experts)
        else:
            masked = is_masked("fastest", ids.shape[0], 1, self.experts)
            places = expert_places(ids, self.experts, masked=masked)
        x = to_places(values[rows], scale[rows], places, slots=1)
        return from_places(grouped_gemm(x, stacked, places, self.scale_format), places)


@functools.cache
def start(experts: int, columns: int, inner: int, scale_format: str, device: torch.device) -> None:
    """Probe weights [E, N, K] once, unless `deep_gemm_start.prepare` has.

    It waits for the device: the first call of a layer must not be captured in a graph. It compiles
    kernels, one after the other, where DeepGEMM has none of this shape on disk.

    Raises:
        NumericsError: a row's bits follow the number of rows or the layout on this machine.
    """
    shape = Fp8GroupedGemmShape(experts, columns, inner, _FEWEST_ROWS, scale_format)
    if not has_passed(shape, device):
        check_rows(shape, device)


def layer_shapes(
    experts: int, hidden: int, width: int, rows: int, scale_format: str
) -> tuple[Fp8GroupedGemmShape, Fp8GroupedGemmShape]:
    """Return the two shapes of a layer.

    Args:
        experts, hidden, width: E, H and I.
        rows: tokens of a step times experts of a token, at most.
        scale_format: "fp32" or "ue8m0".
    """
    most = min(rows, LARGEST_ROWS)
    return (
        Fp8GroupedGemmShape(experts, 2 * width, hidden, most, scale_format),
        Fp8GroupedGemmShape(experts, hidden, width, most, scale_format),
    )
