"""Block-FP8 linears: what vLLM's Fp8Config asks for, computed from the weights as they are loaded.

Values and scales stand in vLLM's own parameters (`weight`, `weight_scale_inv`), are filled by its
loader and read by our op as they are: nothing is derived, so nothing follows an update.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.parameter import BlockQuantScaleParameter

from consistent_kernels.contract import Contract
from consistent_kernels.errors import UnsupportedError
from consistent_kernels.fp8_linear import fp8_linear
from consistent_kernels.fp8_linear.spec import BLOCK_K
from vllm_consistent.contracts import current_contract


def scale_format_of(contract: Contract) -> str | None:
    """Return the scales of a contract's FP8 weights, or None where it has none."""
    return contract.model.get("quantization.scale_format")


class ConsistentFp8LinearMethod(LinearMethodBase):
    """y = fp8_linear(x, weight, weight_scale_inv)."""

    def __init__(self, contract: Contract) -> None:
        self.impl = contract.implementation("fp8_linear")
        self.scale_format = scale_format_of(contract)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register weight [N, K] and weight_scale_inv [N / 128, K / 128], under vLLM's names.

        Raises:
            UnsupportedError: a part of a fused weight that is no multiple of 128 rows: a block
                would hold rows of two.
        """
        wrong = [size for size in (*output_partition_sizes, input_size) if size % BLOCK_K]
        if wrong or layer.skip_bias_add or layer.has_bias:
            raise UnsupportedError(
                f"FP8 linear {layer.prefix}",
                f"widths {wrong}, bias={layer.has_bias}, skip_bias_add={layer.skip_bias_add}",
                [f"widths in multiples of {BLOCK_K}, no bias"],
            )
        # vLLM takes this loader for the methods that it knows by name.
        loader = getattr(layer, "weight_loader_v2", extra_weight_attrs.get("weight_loader"))
        block = [BLOCK_K, BLOCK_K]
        layer.weight_block_size = block
        layer.register_parameter(
            "weight",
            create_fp8_weight_parameter(
                sum(output_partition_sizes), input_size_per_partition, loader
            ),
        )
        scale = create_fp8_scale_parameter(
            BlockQuantScaleParameter,
            output_partition_sizes,
            input_size_per_partition,
            block,
            loader,
        )
        layer.register_parameter("weight_scale_inv", scale)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing: values and scales are read as loaded."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, K] -> [T, N] in the dtype of x."""
        return fp8_linear(
            x,
            layer.weight,
            layer.weight_scale_inv,
            scale_format=self.scale_format,
            impl=self.impl,
        )


class _OurMethods:
    """Stands in for vLLM's Fp8Config while a layer is built: its kernels are never chosen."""

    def __init__(self, config: Fp8Config, contract: Contract) -> None:
        self.config = config
        self.contract = contract

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def get_quant_method(self, layer: Any, prefix: str) -> LinearMethodBase:
        mapping = self.config.packed_modules_mapping
        if is_layer_skipped(prefix, self.config.ignored_layers, mapping):
            return UnquantizedLinearMethod()
        return ConsistentFp8LinearMethod(self.contract)


def our_methods(quant_config: Any, layer: str) -> Any:
    """Return what a linear layer shall take for its quantization config.

    Args:
        quant_config: vLLM's, or None.
        layer: the name of our class.

    Raises:
        UnsupportedError: another quantization, or one that the contract does not know.
    """
    if quant_config is None:
        return None
    contract = current_contract(layer)
    if type(quant_config) is not Fp8Config or scale_format_of(contract) is None:
        raise UnsupportedError(
            layer,
            f"{type(quant_config).__name__} under contract {contract.name}",
            ["Fp8Config under a block-FP8 contract", "no quantization"],
        )
    return _OurMethods(quant_config, contract)
