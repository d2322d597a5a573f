"""Registers our layers under vLLM's names; imported by the worker class, never by the plugin."""

from __future__ import annotations

from vllm.model_executor.custom_op import op_registry_oot

from vllm_consistent.layers.activation import ConsistentSiluAndMul
from vllm_consistent.layers.embedding import (
    ConsistentParallelLMHead,
    ConsistentVocabParallelEmbedding,
)
from vllm_consistent.layers.fused_moe import ConsistentMoERunner, ConsistentRoutedExperts
from vllm_consistent.layers.layernorm import ConsistentRMSNorm
from vllm_consistent.layers.linear import (
    ConsistentColumnParallelLinear,
    ConsistentMergedColumnParallelLinear,
    ConsistentQKVParallelLinear,
    ConsistentReplicatedLinear,
    ConsistentRowParallelLinear,
)
from vllm_consistent.layers.logits import ConsistentLogitsProcessor
from vllm_consistent.layers.rotary import (
    ConsistentLinearScalingRotaryEmbedding,
    ConsistentLlama3RotaryEmbedding,
    ConsistentRotaryEmbedding,
    ConsistentYaRNScalingRotaryEmbedding,
)

LAYERS: tuple[type, ...] = (
    ConsistentColumnParallelLinear,
    ConsistentLinearScalingRotaryEmbedding,
    ConsistentLlama3RotaryEmbedding,
    ConsistentLogitsProcessor,
    ConsistentMergedColumnParallelLinear,
    ConsistentMoERunner,
    ConsistentParallelLMHead,
    ConsistentQKVParallelLinear,
    ConsistentReplicatedLinear,
    ConsistentRMSNorm,
    ConsistentRotaryEmbedding,
    ConsistentRoutedExperts,
    ConsistentRowParallelLinear,
    ConsistentSiluAndMul,
    ConsistentVocabParallelEmbedding,
    ConsistentYaRNScalingRotaryEmbedding,
)
_PREFIX = "Consistent"


def register_layers() -> None:
    """Register every layer once; vLLM asserts on duplicates."""
    for layer in LAYERS:
        stock = layer.__name__.removeprefix(_PREFIX)
        registered = op_registry_oot.get(stock)
        if registered is layer:
            continue
        # Both CustomOp and PluggableLayer offer register_oot; each layer inherits the right one.
        layer.register_oot(name=stock)(layer)
