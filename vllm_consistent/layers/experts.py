"""Experts in bf16: the stacked weights of vLLM's RoutedExperts, prepared for our kernels."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from consistent_kernels.expert_parallel import expert_parallel_experts
from consistent_kernels.experts import experts, prepare_expert_weight
from vllm_consistent.layers.derived import Derived
from vllm_consistent.layers.expert_parallel import ExpertRanks


class ExpertsMethod(FusedMoEMethodBase):
    """What `ConsistentMoERunner` asks of a method: weights and `run`, no kernel of vLLM's."""

    @property
    def is_monolithic(self) -> bool:
        """Tells vLLM not to build a kernel of its own: the runner never asks for one."""
        return True

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: it is for vLLM's kernels, which are not asked."""

    def run(
        self,
        layer: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        ranks: ExpertRanks | None,
    ) -> torch.Tensor:
        """[T, H] -> [T, H]; through the experts of all `ranks`, where they share them."""
        raise NotImplementedError


class ConsistentExpertsMethod(ExpertsMethod):
    """Stacked weights [E, 2 I, H] and [E, H, I], kept as loaded for in-place updates."""

    def __init__(self, moe: Any, impl: str) -> None:
        super().__init__(moe)
        self.impl = impl
        self.prepared = (Derived(), Derived())

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register w13_weight (gate rows, then up rows) and w2_weight, under vLLM's names."""
        width = intermediate_size_per_partition
        for name, shape in (
            ("w13_weight", (num_experts, 2 * width, hidden_size)),
            ("w2_weight", (num_experts, hidden_size, width)),
        ):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, extra_weight_attrs)

    def prepare(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights that `apply` must use now, computed afresh from the loaded ones."""
        w13, w2 = (
            prepare_expert_weight(weight.data, dtype=layer.params_dtype, impl=self.impl)
            for weight in (layer.w13_weight, layer.w2_weight)
        )
        return w13, w2

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rebuild the prepared weights, into the old ones' storage where there is one."""
        weights = (layer.w13_weight, layer.w2_weight)
        for derived, weight, fresh in zip(self.prepared, weights, self.prepare(layer), strict=True):
            derived.rebuild(weight, fresh)

    def run(
        self,
        layer: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        ranks: ExpertRanks | None,
    ) -> torch.Tensor:
        """[T, H] -> [T, H]; through the experts of all `ranks`, where they share them."""
        w13, w2 = self.prepared
        given = (x, w13.of(layer.w13_weight), w2.of(layer.w2_weight), ids, weights)
        # A router chooses no expert twice, so any layout will do.
        options = {"limit": layer.swiglu_limit, "layout": "fastest", "impl": self.impl}
        if ranks is None:
            return experts(*given, **options)
        exchange, placement = ranks
        return expert_parallel_experts(*given, exchange=exchange, placement=placement, **options)
