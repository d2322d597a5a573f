"""Mixture of experts: our router and experts in place of vLLM's runner and its kernels.

vLLM's `FusedMoE` is a function: it builds a RoutedExperts (which owns the weights and their loader)
and a MoERunner (which calls gate, router and experts). Both are pluggable layers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.utils import set_weight_attrs

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.expert_parallel import expert_parallel_experts
from consistent_kernels.experts import experts, prepare_expert_weight
from consistent_kernels.router import router
from vllm_consistent.contracts import current_contract
from vllm_consistent.layers.derived import Derived
from vllm_consistent.layers.expert_parallel import ExpertRanks, expert_ranks, held_experts
from vllm_consistent.layers.fp8 import our_methods, scale_format_of
from vllm_consistent.layers.fp8_experts import ConsistentFp8ExpertsMethod
from vllm_consistent.layers.router import ConsistentGateMethod, router_parameters


class ConsistentExpertsMethod(FusedMoEMethodBase):
    """Stacked weights [E, 2 I, H] and [E, H, I], kept as loaded for in-place updates."""

    def __init__(self, moe: Any, impl: str) -> None:
        super().__init__(moe)
        self.impl = impl
        self.prepared = (Derived(), Derived())

    @property
    def is_monolithic(self) -> bool:
        """Tells vLLM not to build a kernel of its own: `ConsistentMoERunner` never asks for one."""
        return True

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

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Nothing is quantized."""

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


class ConsistentRoutedExperts(RoutedExperts):
    """Owns the experts' weights; vLLM's loader fills them."""

    def _get_quant_method(
        self, prefix: str, quant_config: Any, moe_config: Any
    ) -> ConsistentExpertsMethod | ConsistentFp8ExpertsMethod:
        contract = current_contract(type(self).__name__)
        quantized = our_methods(quant_config, type(self).__name__) is not None
        if quantized != (scale_format_of(contract) is not None):
            raise UnsupportedError(
                self.layer_name,
                f"quantized={quantized} under contract {contract.name}",
                ["the quantization of the contract"],
            )
        if quantized:
            return ConsistentFp8ExpertsMethod(moe_config, contract)
        return ConsistentExpertsMethod(moe_config, contract.implementation("experts"))

    @property
    def held(self) -> slice:
        """The experts whose weights are here, of `global_num_experts`."""
        return held_experts(self)


class ConsistentMoERunner(MoERunner):
    """Gate with fp32 logits, router, experts; summed in fp32 in slot order, one rounding."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        contract = current_contract(type(self).__name__)
        layer = self.routed_experts
        _refuse_unserved(self)
        self.router_impl = contract.implementation("router")
        self.router_parameters = router_parameters(layer, contract)
        self.gate.quant_method = ConsistentGateMethod(self.gate)
        self.ranks = expert_ranks(layer)

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H] -> [T, H]; `router_logits` holds the hidden states: the gate is here."""
        logits, _ = self.gate(hidden_states)
        ids, weights = router(logits, parameters=self.router_parameters, impl=self.router_impl)
        layer = self.routed_experts
        return layer.quant_method.run(layer, hidden_states, ids, weights, self.ranks)


def _refuse_unserved(runner: MoERunner) -> None:
    layer = runner.routed_experts
    config = runner.moe_config
    got = {
        "gate": (runner.gate is not None, True),
        "shared experts": (runner.shared_experts is not None, False),
        "shared_expert_gate": (runner.shared_expert_gate is not None, False),
        "routed transforms": (
            runner.routed_input_transform is not None or runner.routed_output_transform is not None,
            False,
        ),
        "output scale": (runner.routed_scaling_factor, 1.0),
        "activation": (layer.activation.value, "silu"),
        "bias": (config.has_bias, False),
        "correction bias": (layer.e_score_correction_bias is not None, False),
        "weight on input": (layer.apply_router_weight_on_input, False),
        "custom routing": (layer.custom_routing_function is not None, False),
    }
    wrong = [f"{name}={value!r}" for name, (value, expected) in got.items() if value != expected]
    if wrong:
        supported = [f"{name}={expected!r}" for name, (_, expected) in got.items()]
        raise UnsupportedError(f"experts of {runner.layer_name}", ", ".join(wrong), supported)
