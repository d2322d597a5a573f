"""Causal attention: packed and paged, one arithmetic for prefill, chunks and decode."""

from consistent_kernels.attention.api import (
    attention_paged,
    attention_varlen,
    attention_varlen_bwd,
    plan_attention,
    write_kv,
)
from consistent_kernels.attention.parameters import AttentionParameters

__all__ = [
    "AttentionParameters",
    "attention_paged",
    "attention_varlen",
    "attention_varlen_bwd",
    "plan_attention",
    "write_kv",
]
