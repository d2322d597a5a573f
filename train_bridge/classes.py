"""Which class replaces which, for each architecture.

A replacement derives from the Hugging Face class and keeps its `__name__`: wrap policies of FSDP
and accelerate match layers by that name, and `save_pretrained` writes it into config.json.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from train_bridge.causal_lm import CausalLMForward, DecoderForward
from train_bridge.fp8 import Fp8ExpertsForward, Fp8LinearForward
from train_bridge.modules import (
    AttentionForward,
    DecoderLayerForward,
    EmbeddingForward,
    LinearForward,
    LMHeadForward,
    MLPForward,
    RMSNormForward,
)
from train_bridge.moe import ExpertsForward, SparseMoeBlockForward, TopKRouterForward


def _consistent(forward: type, stock: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `stock` with the forward of `forward`, found as Consistent<name>.

    torch.compile leaves the forward as it is: our ops are opaque, so there is nothing to fuse, and
    what could be fused between them would change bits.
    """
    body = {
        "__module__": __name__,
        "stock": stock,
        "forward": torch.compiler.disable(
            forward.forward, reason="a bridged forward runs the engine's kernels as they are"
        ),
    }
    made = type(stock.__name__, (forward, stock), body)
    made.__qualname__ = f"Consistent{stock.__name__}"
    return made


ConsistentLinear = _consistent(LinearForward, nn.Linear)
ConsistentFp8Linear = _consistent(Fp8LinearForward, nn.Linear)
ConsistentFp8Linear.__qualname__ = "ConsistentFp8Linear"
ConsistentEmbedding = _consistent(EmbeddingForward, nn.Embedding)
ConsistentLMHead = _consistent(LMHeadForward, nn.Linear)
ConsistentLMHead.__qualname__ = "ConsistentLMHead"

ConsistentLlamaRMSNorm = _consistent(RMSNormForward, llama.LlamaRMSNorm)
ConsistentLlamaMLP = _consistent(MLPForward, llama.LlamaMLP)
ConsistentLlamaAttention = _consistent(AttentionForward, llama.LlamaAttention)
ConsistentLlamaDecoderLayer = _consistent(DecoderLayerForward, llama.LlamaDecoderLayer)
ConsistentLlamaModel = _consistent(DecoderForward, llama.LlamaModel)
ConsistentLlamaForCausalLM = _consistent(CausalLMForward, llama.LlamaForCausalLM)

ConsistentQwen2RMSNorm = _consistent(RMSNormForward, qwen2.Qwen2RMSNorm)
ConsistentQwen2MLP = _consistent(MLPForward, qwen2.Qwen2MLP)
ConsistentQwen2Attention = _consistent(AttentionForward, qwen2.Qwen2Attention)
ConsistentQwen2DecoderLayer = _consistent(DecoderLayerForward, qwen2.Qwen2DecoderLayer)
ConsistentQwen2Model = _consistent(DecoderForward, qwen2.Qwen2Model)
ConsistentQwen2ForCausalLM = _consistent(CausalLMForward, qwen2.Qwen2ForCausalLM)

ConsistentQwen3RMSNorm = _consistent(RMSNormForward, qwen3.Qwen3RMSNorm)
ConsistentQwen3MLP = _consistent(MLPForward, qwen3.Qwen3MLP)
ConsistentQwen3Attention = _consistent(AttentionForward, qwen3.Qwen3Attention)
ConsistentQwen3DecoderLayer = _consistent(DecoderLayerForward, qwen3.Qwen3DecoderLayer)
ConsistentQwen3Model = _consistent(DecoderForward, qwen3.Qwen3Model)
ConsistentQwen3ForCausalLM = _consistent(CausalLMForward, qwen3.Qwen3ForCausalLM)

ConsistentQwen3MoeRMSNorm = _consistent(RMSNormForward, qwen3_moe.Qwen3MoeRMSNorm)
ConsistentQwen3MoeMLP = _consistent(MLPForward, qwen3_moe.Qwen3MoeMLP)
ConsistentQwen3MoeTopKRouter = _consistent(TopKRouterForward, qwen3_moe.Qwen3MoeTopKRouter)
ConsistentQwen3MoeExperts = _consistent(ExpertsForward, qwen3_moe.Qwen3MoeExperts)
ConsistentFp8Qwen3MoeExperts = _consistent(Fp8ExpertsForward, qwen3_moe.Qwen3MoeExperts)
ConsistentFp8Qwen3MoeExperts.__qualname__ = "ConsistentFp8Qwen3MoeExperts"
ConsistentQwen3MoeSparseMoeBlock = _consistent(
    SparseMoeBlockForward, qwen3_moe.Qwen3MoeSparseMoeBlock
)
ConsistentQwen3MoeAttention = _consistent(AttentionForward, qwen3_moe.Qwen3MoeAttention)
ConsistentQwen3MoeDecoderLayer = _consistent(DecoderLayerForward, qwen3_moe.Qwen3MoeDecoderLayer)
ConsistentQwen3MoeModel = _consistent(DecoderForward, qwen3_moe.Qwen3MoeModel)
ConsistentQwen3MoeForCausalLM = _consistent(CausalLMForward, qwen3_moe.Qwen3MoeForCausalLM)

CONSISTENT: dict[type[nn.Module], type[nn.Module]] = {
    made.stock: made
    for made in (
        ConsistentLinear,
        ConsistentEmbedding,
        ConsistentLlamaRMSNorm,
        ConsistentLlamaMLP,
        ConsistentLlamaAttention,
        ConsistentLlamaDecoderLayer,
        ConsistentLlamaModel,
        ConsistentLlamaForCausalLM,
        ConsistentQwen2RMSNorm,
        ConsistentQwen2MLP,
        ConsistentQwen2Attention,
        ConsistentQwen2DecoderLayer,
        ConsistentQwen2Model,
        ConsistentQwen2ForCausalLM,
        ConsistentQwen3RMSNorm,
        ConsistentQwen3MLP,
        ConsistentQwen3Attention,
        ConsistentQwen3DecoderLayer,
        ConsistentQwen3Model,
        ConsistentQwen3ForCausalLM,
        ConsistentQwen3MoeRMSNorm,
        ConsistentQwen3MoeMLP,
        ConsistentQwen3MoeTopKRouter,
        ConsistentQwen3MoeExperts,
        ConsistentQwen3MoeSparseMoeBlock,
        ConsistentQwen3MoeAttention,
        ConsistentQwen3MoeDecoderLayer,
        ConsistentQwen3MoeModel,
        ConsistentQwen3MoeForCausalLM,
    )
}
"""Hugging Face class to ours. The output head is an nn.Linear too: `ConsistentLMHead`."""

QUANTIZED: dict[type[nn.Module], tuple[type[nn.Module], tuple[str, ...]]] = {
    nn.Linear: (ConsistentFp8Linear, ("weight",)),
    qwen3_moe.Qwen3MoeExperts: (ConsistentFp8Qwen3MoeExperts, ("gate_up_proj", "down_proj")),
}
"""In a block-FP8 model: Hugging Face class to ours, and its parameters that are FP8. The head is an
nn.Linear that is not quantized."""

MODELS = (
    llama.LlamaForCausalLM,
    qwen2.Qwen2ForCausalLM,
    qwen3.Qwen3ForCausalLM,
    qwen3_moe.Qwen3MoeForCausalLM,
)
"""What `bridge_model` accepts."""

UNUSED = (
    nn.ModuleList,
    nn.SiLU,
    SiLUActivation,
    llama.LlamaRotaryEmbedding,
    qwen2.Qwen2RotaryEmbedding,
    qwen3.Qwen3RotaryEmbedding,
    qwen3_moe.Qwen3MoeRotaryEmbedding,
)
"""Modules that stay: containers, and what our forward does not call."""
