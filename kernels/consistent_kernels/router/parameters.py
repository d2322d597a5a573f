"""The numbers that decide a routing, read alike from vLLM and Hugging Face configurations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from consistent_kernels.contract import Scalar, float_bits
from consistent_kernels.errors import UnsupportedError, invalid

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclasses.dataclass(frozen=True)
class RouterParameters:
    """How scores become experts and weights.

    Attributes:
        num_experts: E, columns of the logits.
        top_k: experts of a token.
        scoring: "softmax" (Qwen3-MoE), "sigmoid" (DeepSeek-V3) or "sqrtsoftplus" (DeepSeek-V4).
        renormalize: divide the chosen scores by their sum.
        scale: DeepSeek's routed_scaling_factor, multiplied last.
        num_groups: n_group; consecutive experts form a group. 1 means no groups.
        top_groups: topk_group, groups that may be chosen from.
    """

    num_experts: int
    top_k: int
    scoring: str
    renormalize: bool
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        op = "router"
        for name in ("num_experts", "top_k", "num_groups", "top_groups"):
            if type(getattr(self, name)) is not int:
                raise invalid(op, name, "an int", repr(getattr(self, name)))
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise invalid(op, "scale", "positive and finite", self.scale)
        if self.scoring not in SCORINGS:
            raise UnsupportedError(op, f"scoring {self.scoring!r}", SCORINGS)
        if not 1 <= self.top_k <= self.num_experts:
            raise invalid(op, "top_k", f"between 1 and num_experts={self.num_experts}", self.top_k)
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise invalid(op, "num_groups", f"a divisor of {self.num_experts}", self.num_groups)
        if not 1 <= self.top_groups <= self.num_groups:
            raise invalid(op, "top_groups", f"between 1 and {self.num_groups}", self.top_groups)
        if self.top_groups * self.group_size < self.top_k:
            raise invalid(
                op,
                "top_groups",
                f"enough groups of {self.group_size} experts for top_k={self.top_k}",
                self.top_groups,
            )

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.num_experts // self.num_groups

    @classmethod
    def from_hf_config(cls, config: Any) -> RouterParameters:
        """Read a Qwen3Moe, DeepseekV2, V3, V3.2 or V4 configuration.

        Raises:
            UnsupportedError: a key that vLLM's class and transformers' read in two senses.
            InvalidInputError: numbers that fit no routing.
        """
        _require_one_reading(config)
        experts = getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", 0)
        v4 = getattr(config, "model_type", None) == "deepseek_v4"
        scoring = getattr(config, "scoring_func", "sqrtsoftplus" if v4 else "softmax")
        return cls(
            num_experts=experts,
            top_k=config.num_experts_per_tok,
            scoring=scoring,
            # Where V4's configuration has no such field: its classes renormalize.
            renormalize=bool(getattr(config, "norm_topk_prob", True)),
            scale=float(getattr(config, "routed_scaling_factor", 1.0)),
            num_groups=getattr(config, "n_group", None) or 1,
            top_groups=getattr(config, "topk_group", None) or 1,
        )

    def to_dict(self) -> dict[str, Scalar]:
        """Return plain JSON types, floats as fp32 bit patterns."""
        return dataclasses.asdict(self) | {"scale": float_bits(self.scale)}


def _require_one_reading(config: Any) -> None:
    """Raise UnsupportedError where vLLM and transformers would route by another rule.

    Source: DeepseekV2MoE of vLLM's models/deepseek_v2.py (V2, V3 and V3.2), which takes softmax
    where scoring_func is absent, groups whatever topk_method says, and renormalizes as
    norm_topk_prob says, as V4 does in vllm/models/deepseek_v4; transformers' DeepseekV3MoE is
    sigmoid whatever the configuration says, its DeepseekV2Moe does not group under "greedy" and
    never renormalizes, and its V4 routers always do.
    """
    family = getattr(config, "model_type", "") or ""
    scoring = getattr(config, "scoring_func", None)
    if family in ("deepseek_v3", "deepseek_v32") and scoring != "sigmoid":
        given = f"scoring_func={scoring!r} of a {family} model"
        raise UnsupportedError("router", given, ("scoring_func='sigmoid' in its config.json",))
    if family == "deepseek_v4" and not getattr(config, "norm_topk_prob", True):
        given = "norm_topk_prob=False of a deepseek_v4 model"
        raise UnsupportedError("router", given, ("norm_topk_prob=True",))
    if family != "deepseek_v2":
        return
    groups = getattr(config, "n_group", None) or 1
    if groups > 1 and getattr(config, "topk_method", None) == "greedy":
        given = f"topk_method='greedy' with n_group={groups}"
        raise UnsupportedError("router", given, ("'group_limited_greedy'", "n_group=1"))
    if getattr(config, "norm_topk_prob", False):
        given = "norm_topk_prob=True of a deepseek_v2 model"
        raise UnsupportedError("router", given, ("norm_topk_prob=False",))
