"""Weight updates of a block-FP8 model: FP8 pairs as they come, masters through our quantization."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from consistent_kernels.contract import Contract
from consistent_kernels.errors import InvalidInputError
from consistent_kernels.fp8_experts import quantize_expert_weight
from consistent_kernels.quantization import quantize_weight
from consistent_kernels.quantization.parameters import SCALE_SUFFIX

FP8 = torch.float8_e4m3fn


def is_quantized(name: str, view: torch.Tensor) -> bool:
    """Whether a served tensor is an FP8 weight or the scales of one."""
    return view.dtype == FP8 or name.endswith(SCALE_SUFFIX)


def as_served(
    pairs: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor], contract: Contract | None
) -> dict[str, torch.Tensor]:
    """Return the pairs as they are served: each float tensor of an FP8 weight as values and scales.

    What the trainer quantized and what it sends as a master give the same bytes: one function.

    Args:
        pairs: to load, of known names and right shapes.
        views: what is served, by the same names.
        contract: the engine's; names scale format and implementation.

    Raises:
        InvalidInputError: FP8 values for a weight that is not FP8, or a master together with
            scales for it.
    """
    served: dict[str, torch.Tensor] = {}
    for name, tensor in pairs.items():
        wanted = views[name]
        if (tensor.dtype == FP8) == (wanted.dtype == FP8):
            served[name] = tensor
            continue
        scale = f"{name}{SCALE_SUFFIX}"
        if tensor.dtype == FP8 or contract is None or scale in pairs:
            raise InvalidInputError(
                f"weight update: {name} must be {wanted.dtype}, got {tensor.dtype}. Send FP8 "
                f"values together with {scale}, or the master alone, and FP8 for FP8 weights only"
            )
        served[name], served[scale] = _quantize(tensor.to(wanted.device), contract)
    return served


def _quantize(master: torch.Tensor, contract: Contract) -> tuple[torch.Tensor, torch.Tensor]:
    options = {
        "scale_format": contract.model["quantization.scale_format"],
        "impl": contract.implementation("quantization"),
    }
    if master.dim() == 3:
        experts = quantize_expert_weight(master, **options)
        return experts.values, experts.scale
    return quantize_weight(master, **options)
