"""The grouped FP8 GEMM shapes of a model, for `consistent_kernels.deep_gemm_start.prepare`."""

from __future__ import annotations

import dataclasses

import torch

from consistent_kernels.deep_gemm_start import LARGEST_ROWS
from consistent_kernels.experts.deep_gemm_places import expert_places
from consistent_kernels.experts.deep_gemm_rows import from_places
from consistent_kernels.fp8_experts.deep_gemm import grouped_gemm
from consistent_kernels.fp8_experts.deep_gemm_rows import to_places
from consistent_kernels.fp8_linear.deep_gemm import Fp8GemmShape
from consistent_kernels.fp8_linear.probe import Operands


@dataclasses.dataclass(frozen=True, order=True)
class Fp8GroupedGemmShape:
    """Stacked weights [E, N, K], in the contiguous layout that serves.

    Attributes:
        experts, columns, inner: E, N, K.
        max_rows: the most rows to probe, one slot each.
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
        """Return the library's result for these rows; every other goes to few experts."""
        values, scale, weight, weight_scale = operands
        index = torch.arange(values.shape[0], dtype=torch.int32, device=values.device)
        spread = index * 7 % self.experts
        ids = torch.where(index % 2 == 0, spread, spread // 4)[rows, None].contiguous()
        stacked = (
            weight.view(self.experts, self.columns, self.inner),
            weight_scale.view(self.experts, -1, weight_scale.shape[1]),
        )
        places = expert_places(ids, self.experts, masked=False)
        x = to_places(values[rows], scale[rows], places, slots=1)
        return from_places(grouped_gemm(x, stacked, places, self.scale_format), places)


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
