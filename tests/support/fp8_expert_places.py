"""What FP8 experts over DeepGEMM's places must give, row by row; and a stand-in for the library."""

from __future__ import annotations

import torch

from consistent_kernels.experts.deep_gemm_places import AnyPlaces, PackedPlaces
from consistent_kernels.fp8_linear.reference import fp8_gemm_ref
from consistent_kernels.quantization import quantize_weight
from consistent_kernels.testing import hazard_activations

EXPERTS, SLOTS, HIDDEN, WIDTH = 6, 2, 512, 128


def operands(
    tokens: int, scale_format: str, *, device: str = "cpu", impl: str = "reference"
) -> tuple[torch.Tensor, ...]:
    """x, w13, w13_scale, w2, w2_scale, ids: low experts often, the last never, -1 now and then."""
    x = hazard_activations((tokens, HIDDEN), seed=1, device=device)
    generator = torch.Generator().manual_seed(2)
    weights = []
    for rows, columns in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        masters = torch.randn(EXPERTS, rows, columns, generator=generator) * 0.05
        values, scale = quantize_weight(
            masters.view(-1, columns).to(device), scale_format=scale_format, impl=impl
        )
        weights += [values.view(EXPERTS, rows, columns), scale.view(EXPERTS, rows // 128, -1)]
    score = torch.rand((tokens, EXPERTS), generator=generator) ** (1 + torch.arange(EXPERTS) / 4)
    score[:, -1] = -1.0
    ids = torch.topk(score, SLOTS, dim=-1).indices.int()
    ids[::11] = -1
    ids[::7, -1] = -1
    return x, *weights, ids.to(device)


def expert_of_places(places: AnyPlaces) -> torch.Tensor:
    """[places] expert of each place, -1 where none is needed."""
    if not isinstance(places, PackedPlaces):
        return places.expert
    found = torch.full((places.size,), -1, dtype=torch.int32)
    first = 0
    for expert, end in enumerate(places.end.tolist()):
        assert end >= first, "the library counts in unsigned numbers"
        found[first:end] = expert
        first = -(-end // places.alignment) * places.alignment
    assert first <= places.size, "no tile reaches beyond the last place"
    return found


def stand_in_gemm(
    x: tuple[torch.Tensor, torch.Tensor],
    weight: tuple[torch.Tensor, torch.Tensor],
    places: AnyPlaces,
    scale_format: str,
) -> torch.Tensor:
    """The grouped GEMM, one expert at a time; NaN in places not in use."""
    of_place = expert_of_places(places)
    scale = x[1].reshape(x[0].shape[0], -1)
    y = torch.full((x[0].shape[0], weight[0].shape[1]), float("nan"), dtype=torch.bfloat16)
    for expert in range(weight[0].shape[0]):
        mine = of_place == expert
        y[mine] = fp8_gemm_ref(
            x[0].view(torch.uint8)[mine].view(torch.float8_e4m3fn),
            scale[mine],
            weight[0][expert],
            weight[1][expert],
            torch.bfloat16,
        )
    return y
