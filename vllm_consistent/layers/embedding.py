"""Token embedding and language-model head, tied or not."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from consistent_kernels.embedding import embedding
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


class ConsistentHeadMethod(UnquantizedEmbeddingMethod):
    """logits = linear(hidden, weight[:vocab]) in fp32: nothing rounds them before the log-prob."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        contract = current_contract(type(layer).__name__)
        self.impl = contract.implementation("linear")
        self.embedding_impl = contract.implementation("embedding")
        self.prepared = Derived()
        self.packed: PackedWeight | None = None

    def prepare(self, layer: Any) -> torch.Tensor:
        """Return the head over the real vocabulary: vLLM pads rows, the trainer does not."""
        rows = layer.weight.data[: layer.org_vocab_size]
        return prepare_weight(
            rows, dtype=layer.params_dtype, impl=self.impl, out_dtype=torch.float32
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rebuild the prepared head, and its packed copy where the program has one."""
        self.prepared.rebuild(layer.weight, self.prepare(layer))
        weight = self._weight(layer)
        if self.packed is None:
            self.packed = pack_weight(weight, impl=self.impl, lasting=True)
        else:
            self.packed.rebuild(weight)

    def packed_follows(self, layer: Any) -> bool:
        """Return whether the packed copy holds the weight that is served now."""
        return self.packed is None or self.packed.follows(self._weight(layer))

    def _weight(self, layer: Any) -> torch.Tensor:
        return self.prepared.of(layer.weight.data)[: layer.org_vocab_size]

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H] -> [T, vocab] fp32."""
        if self.packed is not None:
            return linear_packed(x, self.packed, bias, out_dtype=torch.float32)
        return linear(x, self._weight(layer), bias, impl=self.impl, out_dtype=torch.float32)

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H], rows of the loaded weight."""
        return embedding(input_, layer.weight, impl=self.embedding_impl)


class ConsistentEmbeddingMethod(ConsistentHeadMethod):
    """An embedding, which Qwen models hand to the logits processor when the head is tied."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Rebuild the prepared head, if this embedding serves as one."""
        if self.prepared.built:
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H] -> [T, vocab] fp32; the first call (vLLM's profiling run) prepares the head."""
        if not self.prepared.built:
            # An inference tensor could not be rebuilt in place by a later update.
            with torch.inference_mode(False), torch.no_grad():
                super().process_weights_after_loading(layer)
        return super().apply(layer, x, bias)


class ConsistentVocabParallelEmbedding(VocabParallelEmbedding):
    """See `ConsistentEmbeddingMethod`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quant_method = ConsistentEmbeddingMethod(self)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]; one rank, so no mask and no reduction."""
        return self.quant_method.embedding(self, input_)


class ConsistentParallelLMHead(ParallelLMHead):
    """See `ConsistentHeadMethod`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            raise UnsupportedError("lm_head", "a bias", ["no bias"])
        self.quant_method = ConsistentHeadMethod(self)
