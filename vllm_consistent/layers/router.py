"""The gate of a mixture of experts: a linear with fp32 logits, and the routing of its layer."""

from __future__ import annotations

from typing import Any

import torch

from consistent_kernels.contract import Contract
from consistent_kernels.errors import ContractMismatchError
from consistent_kernels.linear import linear, linear_packed, pack_weight, prepare_weight
from consistent_kernels.router import RouterParameters
from vllm_consistent.layers.linear import ConsistentLinearMethod


class ConsistentGateMethod(ConsistentLinearMethod):
    """logits = linear(x, prepared weight) in fp32: nothing is rounded before experts are chosen."""

    def prepare(self, layer: Any) -> torch.Tensor:
        """Return the weight that `apply` must use now, computed afresh from `layer.weight`."""
        return prepare_weight(
            layer.weight.data, dtype=layer.params_dtype, impl=self.impl, out_dtype=torch.float32
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rebuild the prepared weight, and its packed copy where that gives fp32 results."""
        self.prepared.rebuild(layer.weight, self.prepare(layer))
        weight = self.prepared.of(layer.weight.data)
        if self.packed is None:
            packed = (
                pack_weight(weight, impl=self.impl, lasting=True) if self.impl == "llvm" else None
            )
            self.packed = [] if packed is None else [packed]
        for each in self.packed:
            each.rebuild(weight)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H] -> [T, E] fp32."""
        if self.packed:
            return linear_packed(x, self.packed[0], bias, out_dtype=torch.float32)
        weight = self.prepared.of(layer.weight)
        return linear(x, weight, bias, impl=self.impl, out_dtype=torch.float32)


def router_parameters(experts: Any, contract: Contract) -> RouterParameters:
    """Return the routing that vLLM's model class asked for.

    Args:
        experts: vLLM's RoutedExperts.
        contract: the engine's.

    Raises:
        ContractMismatchError: it is not the contract's, so the trainer would route otherwise.
    """
    parameters = RouterParameters(
        num_experts=experts.global_num_experts,
        top_k=experts.top_k,
        scoring=experts.scoring_func,
        renormalize=bool(experts.renormalize),
        scale=float(experts.routed_scaling_factor),
        num_groups=experts.num_expert_group or 1,
        top_groups=experts.topk_group or 1,
    )
    differing = [
        f"{key}: {value!r} != {contract.model.get(f'moe.{key}')!r}"
        for key, value in parameters.to_dict().items()
        if value != contract.model.get(f"moe.{key}")
    ]
    if differing:
        raise ContractMismatchError(
            f"routing of {experts.layer_name} differs from contract {contract.name}: "
            f"{'; '.join(differing)}"
        )
    return parameters
