"""What a model fixes about its attention layers."""

from __future__ import annotations

import dataclasses
import math

from consistent_kernels.attention.spec import DEFAULT_KEY_SPLIT, KEY_TILE
from consistent_kernels.errors import UnsupportedError, invalid
from consistent_kernels.model_facts import HEAD_DIMS


@dataclasses.dataclass(frozen=True)
class AttentionParameters:
    """Heads, scale, window and key split of one attention layer.

    Attributes:
        num_heads: query heads; head h reads key head h // (num_heads // num_kv_heads).
        num_kv_heads: key and value heads.
        head_dim: 64, 80, 96, 128 or 256.
        scale: multiplies the dot product, as fp32.
        sliding_window: a query at position t sees the last min(t + 1, sliding_window) keys, itself
            included; None sees all.
        key_split: keys in one split, counted from position 0; a multiple of 64. Moves bits.

    Raises:
        InvalidInputError: a value that no attention has.
        UnsupportedError: a head_dim that no program serves.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    key_split: int = DEFAULT_KEY_SPLIT

    def __post_init__(self) -> None:
        op = "attention"
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise invalid(
                op,
                "num_heads",
                f"a positive multiple of num_kv_heads ({self.num_kv_heads})",
                self.num_heads,
            )
        if self.head_dim not in HEAD_DIMS:
            raise UnsupportedError(op, f"head_dim {self.head_dim}", HEAD_DIMS)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise invalid(op, "scale", "a positive finite number", self.scale)
        if self.sliding_window is not None and self.sliding_window < 1:
            raise invalid(op, "sliding_window", "None or at least 1", self.sliding_window)
        if self.key_split < KEY_TILE or self.key_split % KEY_TILE:
            raise invalid(op, "key_split", f"a multiple of {KEY_TILE}", self.key_split)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads
