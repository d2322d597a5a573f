"""Inputs that make the usual mistakes visible."""

from __future__ import annotations

import torch

BATCH_SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
"""Row counts on both sides of the sizes at which stock kernels switch (8, 10, 16, 32, ... 256)."""

MANY_BATCH_SIZES = (*BATCH_SIZES, 3, 100, 200, 511, 512, 513, 1000, 1024, 2048)
"""And further ones, for ops whose programs switch up there too."""


def hazard_activations(
    shape: tuple[int, ...],
    *,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Normal values with outlier channels, exact ties, signed zeros and tiny values among them.

    Outliers (x30 in every 17th column) make early rounding visible; ties and -0.0 make
    tie-breaks and sign handling visible; values near 1e-30 stay normal in bf16 and fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[..., ::17] *= 30.0
    flat = x.view(-1)
    pick = torch.rand(flat.shape, generator=generator)
    flat[pick < 0.02] = 0.0
    flat[(pick >= 0.02) & (pick < 0.04)] = -0.0
    flat[(pick >= 0.04) & (pick < 0.06)] = 0.5
    flat[(pick >= 0.06) & (pick < 0.07)] = 1e-30
    return x.to(dtype).to(device)


def norm_weight(
    size: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Norm weights around 1 +- 0.2: with weights of 1 a wrong rounding order is invisible."""
    generator = torch.Generator().manual_seed(seed)
    return (1.0 + 0.2 * torch.randn(size, generator=generator)).to(dtype).to(device)


def peaked_logits(rows: int, vocab: int, *, seed: int, device: str = "cpu") -> torch.Tensor:
    """FP32 logits with a few dominant entries a row: flat random logits hide mismatches."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 2.0
    winners = torch.randint(vocab, (rows, min(3, vocab)), generator=generator)
    logits.scatter_add_(1, winners, torch.full(winners.shape, 14.0))
    return logits.to(device)
