"""Block-FP8 experts: the stacked weights of vLLM's RoutedExperts, read as they are loaded."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

from consistent_kernels.contract import Contract
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.expert_parallel import over_ranks
from consistent_kernels.experts import combine
from consistent_kernels.fp8_experts import Fp8ExpertWeight, fp8_expert_outputs, fp8_experts
from consistent_kernels.fp8_experts.spec import BLOCK_K, experts_of
from vllm_consistent.layers.expert_parallel import ExpertRanks
from vllm_consistent.layers.experts import ExpertsMethod
from vllm_consistent.layers.fp8 import scale_format_of


class ConsistentFp8ExpertsMethod(ExpertsMethod):
    """w13_weight [E, 2 I, H] and w2_weight [E, H, I] in float8_e4m3fn, with a scale a block."""

    def __init__(self, moe: Any, contract: Contract) -> None:
        super().__init__(moe)
        self.impl = contract.implementation("fp8_experts")
        self.scale_format = scale_format_of(contract)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register values and `<name>_scale_inv` scales under vLLM's names; gate rows, then up."""
        width = intermediate_size_per_partition
        if width % BLOCK_K or hidden_size % BLOCK_K:
            raise UnsupportedError(
                f"FP8 experts {layer.layer_name}",
                f"hidden size {hidden_size}, width {width}",
                [f"multiples of {BLOCK_K}: a block holds rows of gate or of up"],
            )
        for name, rows, columns in (
            ("w13_weight", 2 * width, hidden_size),
            ("w2_weight", hidden_size, width),
        ):
            values = torch.empty((num_experts, rows, columns), dtype=torch.float8_e4m3fn)
            # vLLM builds layers under the model dtype as default.
            blocks = (num_experts, rows // BLOCK_K, columns // BLOCK_K)
            scale = torch.empty(blocks, dtype=torch.float32)
            block = {"quant_method": FusedMoeWeightScaleSupported.BLOCK.value}
            for local, tensor, attributes in (
                (name, values, extra_weight_attrs),
                (f"{name}_scale_inv", scale, extra_weight_attrs | block),
            ):
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                layer.register_parameter(local, parameter)
                set_weight_attrs(parameter, attributes)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing: values and scales are read as loaded."""

    def run(
        self,
        layer: Any,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        ranks: ExpertRanks | None,
    ) -> torch.Tensor:
        stacked = (
            Fp8ExpertWeight(layer.w13_weight, layer.w13_weight_scale_inv),
            Fp8ExpertWeight(layer.w2_weight, layer.w2_weight_scale_inv),
        )
        options = {
            "scale_format": self.scale_format,
            "limit": layer.swiglu_limit,
            "layout": "fastest",
            "impl": self.impl,
        }
        if ranks is None:
            return fp8_experts(x, *stacked, ids, weights, **options)

        def outputs(rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
            # Rows travel in bf16: quantized here or at their token's rank, they are the same.
            return fp8_expert_outputs(rows, *stacked, local, **options)

        exchange, placement = ranks
        y = over_ranks(x, ids, outputs, exchange=exchange, placement=placement)
        return combine(y, ids, weights, impl=experts_of(self.impl))
