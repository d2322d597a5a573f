"""The parameters that decide rotary's tables, read from a Hugging Face style configuration."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from consistent_kernels.contract import Scalar, float_bits
from consistent_kernels.errors import UnsupportedError, invalid

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeParameters:
    """What a rotary table depends on.

    Attributes:
        head_dim: size of a head.
        rotary_dim: leading part of the head that is rotated; even.
        theta: base of the frequencies.
        max_position: rows of the table; positions must lie below.
        rope_type: "default", "linear" (Chen et al., arXiv 2306.15595), "llama3" (Llama 3.1) or
            "yarn" (Peng et al., arXiv 2309.00071).
        factor, low_freq_factor, high_freq_factor, original_max_position, beta_fast, beta_slow,
        truncate: the type's own numbers, as in Hugging Face's `rope_parameters`.
        attention_factor: multiplies cos and sin.
    """

    head_dim: int
    rotary_dim: int
    theta: float
    max_position: int
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    key: str = dataclasses.field(init=False, repr=False, compare=False, default="")
    """Canonical JSON, by which an opaque op names its tables; `from_key` is the inverse.

    A field, not a property: torch.compile cannot trace the JSON encoder.
    """

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise UnsupportedError("rotary", f"rope_type {self.rope_type!r}", ROPE_TYPES)
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise invalid(
                "rotary", "rotary_dim", f"even and at most {self.head_dim}", self.rotary_dim
            )
        for name in ("theta", "factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise invalid("rotary", name, "finite and above 0", value)
        if self.rope_type == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise invalid(
                "rotary",
                "high_freq_factor",
                f"above low_freq_factor ({self.low_freq_factor})",
                self.high_freq_factor,
            )
        if self.rope_type in ("llama3", "yarn") and self.original_max_position <= 0:
            raise invalid(
                "rotary",
                "original_max_position",
                f"positive for rope_type {self.rope_type!r}",
                self.original_max_position,
                "Set original_max_position_embeddings in the model's rope_parameters",
            )

        object.__setattr__(self, "key", json.dumps(self._numbers(), sort_keys=True))

    def _numbers(self) -> dict[str, Scalar | float]:
        numbers = dataclasses.asdict(self)
        del numbers["key"]
        return numbers

    def to_dict(self) -> dict[str, Scalar]:
        """Return flat JSON scalars, floats as fp32 bit patterns: the form a contract hashes."""
        return {
            name: float_bits(value) if isinstance(value, float) else value
            for name, value in self._numbers().items()
        }

    @classmethod
    def from_key(cls, key: str) -> RopeParameters:
        """Rebuild parameters from `key`."""
        return cls(**json.loads(key))

    @classmethod
    def from_hf_config(cls, config: Any) -> RopeParameters:
        """Read `config.rope_parameters` (transformers 5) of a Llama, Qwen2 or Qwen3 configuration.

        Raises:
            UnsupportedError: a rope type without a table here (dynamic, longrope, mrope, ...).
        """
        rope = dict(getattr(config, "rope_parameters", None) or {})
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if "mrope_section" in rope:
            raise UnsupportedError("rotary", "mrope_section", ROPE_TYPES)
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        factor = 1.0 if rope.get("factor") is None else float(rope["factor"])
        original = int(rope.get("original_max_position_embeddings") or 0)
        attention_factor = 1.0
        if rope_type == "yarn":
            attention_factor = _yarn_attention_factor(rope, factor)
        return cls(
            head_dim=head_dim,
            rotary_dim=int(head_dim * rope.get("partial_rotary_factor", 1.0)),
            theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
            max_position=_table_rows(
                int(config.max_position_embeddings), rope_type, factor, original
            ),
            rope_type=rope_type,
            factor=factor,
            low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
            high_freq_factor=float(rope.get("high_freq_factor", 1.0)),
            original_max_position=original,
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=attention_factor,
        )


def _table_rows(max_position: int, rope_type: str, factor: float, original: int) -> int:
    # max_position_embeddings is the length before the scaling in some configurations (Qwen with
    # yarn) and after it in others (Llama 3.1). A row too many costs memory, one too few a wrong
    # token.
    if rope_type == "linear":
        return int(max_position * max(factor, 1.0))
    return max(max_position, int(original * factor) if rope_type == "yarn" else 0)


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def magnitude(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return magnitude(factor, mscale) / magnitude(factor, all_dim)
    return magnitude(factor, 1.0)
