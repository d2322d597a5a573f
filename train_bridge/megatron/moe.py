"""Mixture-of-experts layers of megatron-core whose forward runs the engine's ops.

With TP 1 and EP 1 a token's experts are on its own rank, so nothing is dispatched: the router's ids
and weights go straight to the experts, which add their slots in fp32 in the engine's order.
megatron-core's dispatchers permute tokens and add slots in the order of experts.
Parameters and names are those of its grouped experts (`linear_fc1.weight0`, ...).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from consistent_kernels.errors import ConfigurationError, invalid
from train_bridge.functions.linear import LinearFunction
from train_bridge.functions.router import RouterFunction
from train_bridge.megatron.functions import ListedExpertsFunction
from train_bridge.megatron.layers import MegatronModule, new_weight
from train_bridge.modules import Gemm

_linear = LinearFunction.apply
_router = RouterFunction.apply
_experts = ListedExpertsFunction.apply


class VllmTopKRouter(MegatronModule, TopKRouter):
    """A gate with fp32 logits and the experts that it chooses; no auxiliary loss."""

    serves = "router"

    def gemms(self) -> Iterator[Gemm]:
        """Yield its GEMM."""
        yield Gemm(*self.weight.shape, out_fp32=True)

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] to (ids [T, K] int32, weights [T, K] fp32), slots by descending score."""
        if input.dim() != 2:
            raise invalid("VllmTopKRouter", "input", "[T, H]", f"{input.dim()}-D")
        state, name = self.state, self._bridge_name
        prepared = state.prepared_weight(name, self.weight, torch.float32)
        logits = _linear(input, self.weight, None, prepared, state.impl("linear"), torch.float32)
        state.watch(logits, name, self.weight)
        return _router(logits, None, None, None, state.router, state.impl("router"))


class VllmGroupedLinear(nn.Module):
    """The weights of one projection of all experts, `weight0`, ...; it computes nothing itself."""

    def __init__(self, experts: int, rows: int, columns: int, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config  # Megatron-Bridge asks the module that owns a weight
        self.experts = experts
        for index in range(experts):
            weight = new_weight(config, (rows, columns))
            if config.perform_initialization:
                config.init_method(weight)
            self.register_parameter(f"weight{index}", weight)

    def masters(self) -> list[nn.Parameter]:
        """Return the weights in the order of expert ids, each [N, K]."""
        return [getattr(self, f"weight{index}") for index in range(self.experts)]


class VllmColumnParallelGroupedLinear(VllmGroupedLinear):
    """Gate, then up, of each expert: [2 I, H]."""


class VllmRowParallelGroupedLinear(VllmGroupedLinear):
    """The down projection of each expert: [H, I]."""


class VllmGroupedMLP(MegatronModule, nn.Module):
    """All experts of one layer, on the rank of the token."""

    serves = "experts"

    def expert_stack(self) -> tuple[int, int, int]:
        """Return (E, H, I)."""
        down = self.linear_fc2
        return down.experts, *down.weight0.shape

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.linear_fc1 = VllmColumnParallelGroupedLinear(
            num_local_experts, 2 * width, hidden, config
        )
        self.linear_fc2 = VllmRowParallelGroupedLinear(num_local_experts, hidden, width, config)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, H], ids and fp32 weights [T, K], to [T, H]."""
        state, name = self.state, self._bridge_name
        parts = (self.linear_fc1.masters(), self.linear_fc2.masters())
        prepared = tuple(
            state.prepared_stack(f"{name}.{part}", masters)
            for part, masters in zip(("linear_fc1", "linear_fc2"), parts, strict=True)
        )
        y = _experts(x, ids, weights, prepared, state.impl("experts"), *parts[0], *parts[1])
        state.watch(y, name, *parts[0], *parts[1])
        return y

    def backward_dw(self) -> None:
        """Nothing is left to do: the backward has computed the weights' gradients."""


class VllmMoELayer(MoELayer):
    """Router and experts on the token's own rank; megatron-core's dispatcher is not built."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        # MoELayer's own constructor makes dispatchers, which need CUDA and serve nothing here.
        BaseMoELayer.__init__(self, config, layer_number, groups, is_mtp_layer)
        self.submodules = submodules
        selective = config.recompute_granularity == "selective"
        self.moe_layer_recompute = selective and "moe" in config.recompute_modules
        self.tp_group = groups.tp
        self.router = submodules.router(config=config, pg_collection=groups)
        self.experts = submodules.experts(self.num_local_experts, config, pg_collection=groups)

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[s, b, H] to ([s, b, H], None). Padded rows are computed like others and reach none."""
        if intermediate_tensors is not None:
            raise ConfigurationError(["partial graphs of an MoE layer are not served"], "forward")

        def run(hidden: torch.Tensor) -> torch.Tensor:
            flat = hidden.reshape(-1, hidden.shape[-1])
            return self.experts(flat, *self.router(flat)).view(hidden.shape)

        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(run, False, hidden_states), None
        return run(hidden_states), None
