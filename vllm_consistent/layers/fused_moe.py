"""Mixture of experts: our router and experts in place of vLLM's runner and its kernels.

vLLM's `FusedMoE` is a function: it builds a RoutedExperts (which owns the weights and their loader)
and a MoERunner (which calls gate, router and experts). Both are pluggable layers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.router import router
from vllm_consistent.contracts import current_contract
from vllm_consistent.layers.expert_parallel import expert_ranks, held_experts
from vllm_consistent.layers.experts import ConsistentExpertsMethod, ExpertsMethod
from vllm_consistent.layers.fp8 import our_methods, scale_format_of
from vllm_consistent.layers.fp8_experts import ConsistentFp8ExpertsMethod
from vllm_consistent.layers.router import ConsistentGateMethod, router_parameters


class ConsistentRoutedExperts(RoutedExperts):
    """Owns the experts' weights; vLLM's loader fills them."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> ExpertsMethod:
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
