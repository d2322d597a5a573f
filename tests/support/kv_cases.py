"""Rows, pages and an independent formula for the FP8 KV caches."""

from __future__ import annotations

import struct
from fractions import Fraction

import torch

from consistent_kernels.kv_cache_fp8 import KVLayout
from consistent_kernels.testing import hazard_activations

POISON = 0xFF
"""Byte of unused slots: NaN as e4m3, bf16 and fp32, infinity as UE8M0."""


def hazard_rows(tokens: int, layout: KVLayout, *, seed: int, device: str = "cpu") -> torch.Tensor:
    """Rows over many magnitudes, with zeros, ties, exact powers of two and tiny groups."""
    kv = hazard_activations((tokens, layout.width), seed=seed).float()
    generator = torch.Generator().manual_seed(seed)
    kv *= torch.exp2(torch.randint(-12, 6, (tokens, 1), generator=generator).float())
    kv[0] = 0.0
    if tokens > 4:
        kv[1] = -0.0
        kv[2] = 1e-6
        kv[3, 0] = 448.0  # its group's scale is 1, or the power of two just at the border
        kv[4, : layout.group] = 3.0e-38
    return kv.to(torch.bfloat16).to(device)


def poisoned_cache(
    blocks: int, block_size: int, layout: KVLayout, *, device: str = "cpu", padding: int = 64
) -> torch.Tensor:
    """A cache whose every byte is POISON, with padding behind each block."""
    step = block_size * layout.token_bytes + padding
    flat = torch.full((blocks * step,), POISON, dtype=torch.uint8, device=device)
    return flat.as_strided((blocks, block_size, layout.token_bytes), (step, layout.token_bytes, 1))


def e4m3_byte(value: Fraction) -> int:
    """Nearest e4m3 code of a rational, ties to the even code, saturating; zero is +0."""
    sign, magnitude = (0x80, -value) if value < 0 else (0, value)
    grid = [Fraction(0)]
    for code in range(1, 0x7F):
        exponent, mantissa = code >> 3, code & 7
        step = Fraction(2) ** (max(exponent, 1) - 7 - 3)
        grid.append((mantissa + (8 if exponent else 0)) * step)
    if magnitude >= grid[-1]:
        return sign | 0x7E
    low = max(code for code in range(0x7E) if grid[code] <= magnitude)
    below, above = magnitude - grid[low], grid[low + 1] - magnitude
    up = above < below or (above == below and low % 2 == 1)
    return sign | (low + int(up))


def fp32(value: Fraction | float) -> Fraction:
    """Round a rational to fp32 by way of Python's double (exact for the values used here)."""
    return Fraction(struct.unpack("f", struct.pack("f", float(value)))[0])
