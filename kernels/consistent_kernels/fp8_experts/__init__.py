"""Experts with FP8 operands: block-scaled weights, rows quantized before each GEMM."""

from consistent_kernels.fp8_experts.api import (
    Fp8ExpertWeight,
    fp8_expert_outputs,
    fp8_experts,
    fp8_experts_bwd,
    quantize_expert_weight,
)

__all__ = [
    "Fp8ExpertWeight",
    "fp8_expert_outputs",
    "fp8_experts",
    "fp8_experts_bwd",
    "quantize_expert_weight",
]
