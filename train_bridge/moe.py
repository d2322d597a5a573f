"""Forwards of a mixture-of-experts block on our ops; mixed into the Hugging Face classes.

The gate and the experts read their own parameters, each in its own forward, so that FSDP2 may
gather them one by one; what they exchange is Hugging Face's (logits, weights, ids).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from train_bridge.functions.experts import ExpertsFunction
from train_bridge.functions.linear import LinearFunction
from train_bridge.functions.router import RouterFunction
from train_bridge.modules import Bridged, Gemm

_linear = LinearFunction.apply
_router = RouterFunction.apply
_experts = ExpertsFunction.apply


class TopKRouterForward(Bridged):
    """A gate with fp32 logits and the experts that it chooses."""

    serves = "router"

    def gemms(self) -> Iterator[Gemm]:
        """Yield its GEMM."""
        yield Gemm(*self.weight.shape, out_fp32=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H] to (logits [T, E] fp32, weights [T, K] fp32, ids [T, K] int32)."""
        state = self._bridge
        name = self._bridge_name
        prepared = state.prepared_weight(name, self.weight, torch.float32)
        impl = state.impl("linear")
        logits = _linear(x, self.weight, None, prepared, impl, torch.float32)
        state.watch(logits, name, self.weight)
        ids, weights = _router(logits, None, None, None, state.router, state.impl("router"))
        return logits, weights, ids


class ExpertsForward(Bridged):
    """Stacked expert weights: gate_up_proj [E, 2 I, H] and down_proj [E, H, I]."""

    serves = "experts"

    def expert_stack(self) -> tuple[int, int, int]:
        """Return (E, H, I)."""
        return tuple(self.down_proj.shape)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], ids and fp32 weights [T, K], to [T, H]."""
        state = self._bridge
        masters = (self.gate_up_proj, self.down_proj)
        names = ("gate_up_proj", "down_proj")
        prepared = tuple(
            state.prepared_experts(f"{self._bridge_name}.{name}", master)
            for name, master in zip(names, masters, strict=True)
        )
        impl = state.impl("experts")
        y = _experts(
            hidden_states, *masters, top_k_index, top_k_weights, None, prepared, None, impl
        )
        state.watch(y, self._bridge_name, *masters)
        return y


class SparseMoeBlockForward(Bridged):
    """The experts of each token, weighted and summed on the token's own rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        _, weights, ids = self.gate(x)
        return self.experts(x, ids, weights)
