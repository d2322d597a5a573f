"""Quantized weights of one weight version, kept between forward, recompute and backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from consistent_kernels.fp8_experts import quantize_expert_weight
from consistent_kernels.quantization import quantize_weight
from train_bridge.weight_version import MODEL_DTYPE, WeightVersion

Quantized = tuple[torch.Tensor, torch.Tensor]
"""(values [N, K] float8_e4m3fn, scale [ceil(N / 128), ceil(K / 128)] fp32); of experts [E, ...]."""


class QuantizedWeights:
    """Quantizes each master once a weight version, by the engine's own function.

    The key holds the explicit version and what PyTorch knows of the tensor, so an in-place change
    outside an optimizer is noticed too; one through `.data` is not (bump the version, or look with
    `changed`).
    """

    def __init__(
        self, version: WeightVersion, *, scale_format: str, impl: str, keep: bool = True
    ) -> None:
        """Make an empty store.

        Args:
            version: the model's; bumped after each optimizer step.
            scale_format, impl: as in `quantize_weight`.
            keep: False where masters are gathered layer by layer (FSDP2) and nothing may be kept.
        """
        self._version = version
        self._scale_format, self._impl, self._keep = scale_format, impl, keep
        self._kept: dict[str, tuple[tuple[int, ...], Quantized]] = {}

    def get(self, name: str, master: torch.Tensor) -> Quantized:
        """Return the quantized form of `master`, made at its first use of this version.

        Args:
            name: of the parameter.
            master: [N, K], or [E, N, K] of experts.
        """
        if not self._keep:
            return self.quantize(master)
        key = self._key(master)
        found = self._kept.get(name)
        if found is not None and found[0] == key:
            return found[1]
        self._kept.pop(name, None)  # first, so that two versions never stand side by side
        quantized = self.quantize(master)
        self._kept[name] = key, quantized
        return quantized

    def __getstate__(self) -> dict[str, object]:
        # A copy of the model quantizes its own weights.
        return self.__dict__ | {"_kept": {}}

    def forget(self) -> None:
        """Free everything, for example before the engine wakes on the same device."""
        self._kept.clear()

    def changed(self, masters: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names whose kept form is in use but is not that of the master any more."""
        names = []
        for name, master in masters.items():
            found = self._kept.get(name)
            if found is None or found[0] != self._key(master):
                continue  # would be made again before its next use
            now = self.quantize(master)
            same = (
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(found[1], now, strict=True)
            )
            if not all(same):
                names.append(name)
        return names

    def _key(self, master: torch.Tensor) -> tuple[int, ...]:
        return self._version.value, master._version, master.data_ptr()

    def quantize(self, master: torch.Tensor) -> Quantized:
        """Return the quantized form of `master`, keeping nothing."""
        options = {
            "scale_format": self._scale_format,
            "impl": self._impl,
            "model_dtype": MODEL_DTYPE,
        }
        # A tensor made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            if master.dim() == 3:
                experts = quantize_expert_weight(master, **options)
                return experts.values, experts.scale
            return quantize_weight(master, **options)
