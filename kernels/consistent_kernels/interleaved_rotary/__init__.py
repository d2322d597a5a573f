"""Rotary on adjacent pairs of the last columns (GPT-J style), and its inverse."""

from consistent_kernels.interleaved_rotary.api import interleaved_rotary, interleaved_rotary_

__all__ = ["interleaved_rotary", "interleaved_rotary_"]
