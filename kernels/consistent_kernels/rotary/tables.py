"""Rotary tables: computed once on the CPU, so that every device holds the same bits."""

from __future__ import annotations

import functools
import math

import torch

from consistent_kernels.rotary.parameters import RopeParameters


def inverse_frequencies(rope: RopeParameters) -> torch.Tensor:
    """Return inv_freq [rotary_dim / 2] fp32 on the CPU, scaled as `rope.rope_type` says."""
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float64) / rope.rotary_dim
    inv_freq = 1.0 / torch.pow(torch.tensor(rope.theta, dtype=torch.float64), exponent)
    scale = {
        "default": lambda freq: freq,
        "linear": lambda freq: freq / rope.factor,
        "llama3": functools.partial(_llama3, rope),
        "yarn": functools.partial(_yarn, rope),
    }[rope.rope_type]
    return scale(inv_freq).float()


def _llama3(rope: RopeParameters, inv_freq: torch.Tensor) -> torch.Tensor:
    # Long wavelengths are divided by factor, short ones kept, those between interpolated.
    wavelength = 2 * math.pi / inv_freq
    ratio = rope.original_max_position / wavelength
    smooth = (ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1.0 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn(rope: RopeParameters, inv_freq: torch.Tensor) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        period = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    ramp = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq / rope.factor * ramp + inv_freq * (1.0 - ramp)


@functools.cache
def _tables(key: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    rope = RopeParameters.from_key(key)
    positions = torch.arange(rope.max_position, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope)).double()
    cos = (angles.cos() * rope.attention_factor).float()
    sin = (angles.sin() * rope.attention_factor).float()
    return cos.to(device), sin.to(device)


def rope_tables(
    rope: RopeParameters | str, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each [max_position, rotary_dim / 2] fp32, cached by parameters and device.

    The angle is the fp32 product of position and inv_freq, as the field computes it; cos and sin
    are taken in fp64 and rounded once, so they depend on no vector library and no device.

    Args:
        rope: parameters, or their `key`.
        device: where the tables live.
    """
    return _tables(rope if isinstance(rope, str) else rope.key, str(device))
