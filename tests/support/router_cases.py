"""Routers of known models, and logits that make the usual mistakes visible."""

from __future__ import annotations

import torch

from consistent_kernels.router import RouterParameters

QWEN3 = RouterParameters(num_experts=128, top_k=8, scoring="softmax", renormalize=True)
QWEN3_RAW = RouterParameters(num_experts=60, top_k=4, scoring="softmax", renormalize=False)
DEEPSEEK_V3 = RouterParameters(
    num_experts=256,
    top_k=8,
    scoring="sigmoid",
    renormalize=True,
    scale=2.5,
    num_groups=8,
    top_groups=4,
)
DEEPSEEK_V2 = RouterParameters(
    num_experts=160,
    top_k=6,
    scoring="softmax",
    renormalize=False,
    scale=16.0,
    num_groups=8,
    top_groups=3,
)
DEEPSEEK_V4 = RouterParameters(
    num_experts=256, top_k=6, scoring="sqrtsoftplus", renormalize=True, scale=1.5
)
MODELS = {
    "qwen3": QWEN3,
    "qwen3-raw": QWEN3_RAW,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v4": DEEPSEEK_V4,
}
WITH_BIAS = ("deepseek-v3", "deepseek-v4")


def hazard_logits(rows: int, experts: int, device: str, *, seed: int) -> torch.Tensor:
    """Normal logits, a third of the rows with values from a coarse grid, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((rows, experts), generator=generator) * 2.0
    logits[1::3] = torch.round(logits[1::3])
    logits[2::9] = 0.0
    if rows > 3:
        logits[3] = -0.0
        logits[3, ::2] = 0.0
    return logits.to(device)


def correction_bias(experts: int, device: str, *, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(experts, generator=generator) * 0.1
    bias[::4] = 0.25
    return bias.to(device)


def case(name: str, rows: int, device: str, *, seed: int) -> tuple:
    parameters = MODELS[name]
    bias = correction_bias(parameters.num_experts, device) if name in WITH_BIAS else None
    return hazard_logits(rows, parameters.num_experts, device, seed=seed), bias, parameters


def exact_scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    exact = logits.double()
    if scoring == "softmax":
        return torch.softmax(exact, -1)
    if scoring == "sigmoid":
        return torch.sigmoid(exact)
    return torch.nn.functional.softplus(exact, threshold=100.0).sqrt()
