"""Forwards of quantized layers: FP8 operands, gradients straight through onto the masters.

The masters stay fp32 or bf16 parameters under their Hugging Face names; what the forward multiplies
is made of them once per weight version, by the function that fills the engine.
"""

from __future__ import annotations

import torch

from consistent_kernels.fp8_experts import Fp8ExpertWeight
from train_bridge.functions.fp8_experts import Fp8ExpertsFunction
from train_bridge.functions.fp8_linear import Fp8LinearFunction
from train_bridge.modules import Bridged

_fp8_linear = Fp8LinearFunction.apply
_fp8_experts = Fp8ExpertsFunction.apply


class Fp8LinearForward(Bridged):
    """nn.Linear without a bias as fp8_linear(x, quantized weight)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] in the model dtype to [T, N]."""
        state, name = self._bridge, self._bridge_name
        quantized = state.quantized_weight(f"{name}.weight", self.weight)
        scale_format, impl = state.facts.scale_format, state.impl("fp8_linear")
        y = _fp8_linear(x, self.weight, *quantized, scale_format, impl, None)
        state.watch(y, name, self.weight)
        return y


class Fp8ExpertsForward(Bridged):
    """Stacked experts, gate_up_proj [E, 2 I, H] and down_proj [E, H, I], as fp8_experts."""

    serves = "experts"

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], ids and fp32 weights [T, K], to [T, H]."""
        state = self._bridge
        masters = {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}
        quantized = tuple(
            Fp8ExpertWeight(*state.quantized_weight(f"{self._bridge_name}.{name}", master))
            for name, master in masters.items()
        )
        y = _fp8_experts(
            hidden_states,
            *masters.values(),
            top_k_index,
            top_k_weights,
            None,
            quantized,
            state.facts.scale_format,
            None,
            state.impl("fp8_experts"),
        )
        for master in masters.values():
            state.watch(y, self._bridge_name, master)
        return y
