"""Qwen3's attention block with q norm, k norm and rotary in one op (see `rotary.norm_rotary`)."""

from __future__ import annotations

import torch
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention

from consistent_kernels.errors import UnsupportedError
from consistent_kernels.rotary import norm_rotary
from vllm_consistent.layers.layernorm import ConsistentRMSNorm


class _NormRotaryMixin:
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """positions [T], hidden [T, H] -> [T, H]; vLLM's forward with three ops in one."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        rotary = self.rotary_emb
        q, k = norm_rotary(
            positions,
            q.view(q.shape[0], -1, self.head_dim),
            k.view(k.shape[0], -1, self.head_dim),
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.variance_epsilon,
            rope=rotary.rope,
            impl=rotary.impl,
        )
        output = self.attn(q.view(q.shape[0], -1), k.view(k.shape[0], -1), v)
        return self.o_proj(output)[0]


class ConsistentQwen3Attention(_NormRotaryMixin, Qwen3Attention):
    """Dense Qwen3."""


class ConsistentQwen3MoeAttention(_NormRotaryMixin, Qwen3MoeAttention):
    """Qwen3 with experts."""


_FUSED = {
    Qwen3Attention: ConsistentQwen3Attention,
    Qwen3MoeAttention: ConsistentQwen3MoeAttention,
}


def fuse_qk_norm(model: torch.nn.Module) -> int:
    """Give every Qwen3 attention block of a loaded model the forward above; returns how many.

    Raises:
        UnsupportedError: q and k norm are not ours or differ in eps.
    """
    count = 0
    for module in model.modules():
        fused = _FUSED.get(type(module))
        if fused is None:
            continue
        norms = (module.q_norm, module.k_norm)
        if any(type(norm) is not ConsistentRMSNorm for norm in norms):
            raise UnsupportedError("attention", "stock q or k norm", [ConsistentRMSNorm.__name__])
        if norms[0].variance_epsilon != norms[1].variance_epsilon:
            raise UnsupportedError("attention", "q and k norm of different eps", ["one eps"])
        module.__class__ = fused
        count += 1
    return count
