"""All linear layers: one fp32-accumulated GEMM with a fixed order, from a prepared weight.

A block-FP8 model's layers take `fp8.ConsistentFp8LinearMethod`; its gates and its head are here.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.linear import (
    PackedWeight,
    linear,
    linear_packed,
    pack_weight,
    prepare_weight,
)
from vllm_consistent.contracts import current_contract
from vllm_consistent.layers.derived import Derived
from vllm_consistent.layers.fp8 import ConsistentFp8LinearMethod, our_methods

COLUMN_CUT = 64
"""Fused columns equal separate ones where the cuts are multiples of this (see `linear`)."""


class ConsistentLinearMethod(UnquantizedLinearMethod):
    """y = linear(x, prepared weight, bias); keeps the loaded weight for in-place updates."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.impl = current_contract(type(layer).__name__).implementation("linear")
        self.prepared = Derived()
        self.packed: list[PackedWeight] | None = None
        self._addend: torch.Tensor | None = None
        if layer.skip_bias_add:
            raise UnsupportedError("linear", "skip_bias_add=True", ["skip_bias_add=False"])
        sizes = list(layer.output_partition_sizes)
        # The trainer multiplies q, k, v (gate, up) separately: where a cut falls inside a block of
        # columns, so do we. Decided once, by the model's shape. "llvm" has no blocks.
        cuts_blocks = self.impl != "llvm" and any(size % COLUMN_CUT for size in sizes[:-1])
        self.parts = sizes if cuts_blocks else None

    def prepare(self, layer: Any) -> torch.Tensor:
        """Return the weight that `apply` must use now, computed afresh from `layer.weight`."""
        return prepare_weight(layer.weight.data, dtype=layer.params_dtype, impl=self.impl)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rebuild the prepared weight, into the old one's storage where there is one."""
        self.prepared.rebuild(layer.weight, self.prepare(layer))
        if self.impl == "llvm":
            self._rebuild_addend(layer)
        parts = self._weights(layer)
        if self.packed is None:
            packed = [pack_weight(part, impl=self.impl, lasting=True) for part in parts]
            self.packed = [] if None in packed else packed
            return
        for each, part in zip(self.packed, parts, strict=bool(self.packed)):
            each.rebuild(part)

    def addend(self, layer: Any) -> torch.Tensor:
        """Return the bias as the compiled GEMM adds it, fp32 at one address; "llvm" only."""
        return self._addend

    def packed_follows(self, layer: Any) -> bool:
        """Return whether every packed copy holds the weight that is served now."""
        parts = self._weights(layer)
        if self._addend is not None and not torch.equal(self._addend, self._bias(layer)):
            return False
        return all(each.follows(part) for each, part in zip(self.packed or (), parts, strict=False))

    def _bias(self, layer: Any) -> torch.Tensor:
        from consistent_kernels.linear.llvm import panel_columns

        columns = layer.weight.shape[0]
        bias = torch.zeros(columns + -columns % panel_columns(), dtype=torch.float32)
        if getattr(layer, "bias", None) is not None:
            bias[:columns] = layer.bias.data
        return bias

    def _rebuild_addend(self, layer: Any) -> None:
        with torch.inference_mode(False), torch.no_grad():
            bias = self._bias(layer)
            if self._addend is None:
                self._addend = bias
            else:
                self._addend.copy_(bias)

    def _weights(self, layer: Any) -> tuple[torch.Tensor, ...]:
        weight = self.prepared.of(layer.weight.data)
        return (weight,) if self.parts is None else weight.split(self.parts)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, K] -> [T, N] in the dtype of x; one rounding, after the bias."""
        if self.parts is None:
            if self.packed:
                return linear_packed(x, self.packed[0], bias)
            return linear(x, self.prepared.of(layer.weight), bias, impl=self.impl)
        biases = [None] * len(self.parts) if bias is None else bias.split(self.parts)
        if self.packed:
            pairs = zip(self.packed, biases, strict=True)
            return torch.cat([linear_packed(x, w, b) for w, b in pairs], dim=1)
        pieces = zip(self._weights(layer), biases, strict=True)
        return torch.cat([linear(x, w, b, impl=self.impl) for w, b in pieces], dim=1)


class _LinearMixin:
    def __init__(self, *args: Any, quant_config: Any = None, **kwargs: Any) -> None:
        kind = type(self).__name__
        super().__init__(*args, quant_config=our_methods(quant_config, kind), **kwargs)
        if isinstance(self.quant_method, ConsistentFp8LinearMethod):
            return
        if type(self.quant_method) is not UnquantizedLinearMethod:
            # A config given by position, say: its kernels would not be ours.
            found = type(self.quant_method).__name__
            raise UnsupportedError(kind, found, ["vLLM's unquantized method, or block FP8"])
        self.quant_method = ConsistentLinearMethod(self)


class ConsistentColumnParallelLinear(_LinearMixin, ColumnParallelLinear):
    """See `ConsistentLinearMethod`."""


class ConsistentMergedColumnParallelLinear(_LinearMixin, MergedColumnParallelLinear):
    """Fused gate and up; equals the separate projections bit for bit."""


class ConsistentQKVParallelLinear(_LinearMixin, QKVParallelLinear):
    """Fused q, k and v; equals the separate projections bit for bit."""


class ConsistentRowParallelLinear(_LinearMixin, RowParallelLinear):
    """One rank only (TP > 1 is refused), so there is nothing to reduce."""


class ConsistentReplicatedLinear(_LinearMixin, ReplicatedLinear):
    """See `ConsistentLinearMethod`."""
