"""Names in transformers' own registries, for Hugging Face models that are not bridged.

`attn_implementation="train_bridge"` gives a stock model the engine's attention, and
`experts_implementation="train_bridge"` its experts: the same ops and the same bits as a bridged
model on equal inputs. The rest of the model stays stock (its linears and norms follow the batch),
so this alone makes no log-prob equal to an engine's; `bridge_model` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

from consistent_kernels.attention import AttentionParameters, plan_attention
from consistent_kernels.attention.plan import AttentionPlan
from consistent_kernels.errors import ConfigurationError, invalid
from consistent_kernels.experts import prepare_expert_weight
from consistent_kernels.resolve import choose_implementation
from train_bridge.functions.ambient import plain_settings
from train_bridge.functions.attention import AttentionFunction
from train_bridge.functions.experts import ExpertsFunction

NAME = "train_bridge"
"""What `attn_implementation`, `experts_implementation` and verl's `override_config` are set to."""

_attention = AttentionFunction.apply
_experts = ExpertsFunction.apply


def register_hf_interfaces() -> None:
    """Register the name `train_bridge` for attention, its mask and experts; again is harmless.

    Call it before the model is built or `set_attn_implementation` is used.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, padding_mask)
    ExpertsInterface.register(NAME, experts_forward)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *_: Any,
    attention_mask: torch.Tensor | None = None,
    **__: Any,
) -> torch.Tensor | None:
    """Hand the 2-D padding mask on; transformers would build a 4-D one, or drop it."""
    return None if attention_mask is None else attention_mask[:, -kv_length:]


class _Layout:
    """Where the real tokens of a batch stand, and where its sequences begin."""

    def __init__(
        self,
        key: tuple[Any, ...],
        queries: torch.Tensor,
        keys: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
    ) -> None:
        self.key = key
        self.queries, self.keys = queries, keys
        self.cu_seqlens_q, self.cu_seqlens_k = cu_seqlens_q, cu_seqlens_k
        self.held: tuple[torch.Tensor | None, ...] = ()
        self._plans: dict[AttentionParameters, AttentionPlan] = {}

    def plan(self, params: AttentionParameters, impl: str) -> AttentionPlan:
        """Return attention's plan, made once for all layers of the batch."""
        if params not in self._plans:
            with plain_settings(self.queries.device.type):
                self._plans[params] = plan_attention(
                    self.cu_seqlens_q,
                    params=params,
                    num_tokens=self.queries.numel(),
                    impl=impl,
                    cu_seqlens_k=self.cu_seqlens_k,
                )
        return self._plans[params]


_last: list[_Layout] = []
"""The latest batch: all layers of a model are called with the same mask and positions."""


@torch.compiler.disable  # Dynamo would trace into plans and compiled kernels, and fails there
def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention for transformers' `AttentionInterface`; see `attention_varlen` for the op.

    A sequence starts where a row's real tokens start and where `position_ids` is 0. With a KV cache
    the queries are the last tokens of each row.

    Args:
        query: [B, Hq, Lq, D] bf16 (or fp16; fp32 on CPU); key, value: [B, Hk, Lk, D].
        attention_mask: [B, Lk], non-zero on real tokens, or None.
        scaling: multiplies the scores; D ** -0.5 by default.
        sliding_window: keys a query sees, itself included.
        kwargs: `position_ids` [B, Lq] is read; `cu_seq_lens_*` and `max_length_*` of packed batches
            say the same and are not.

    Returns:
        ([B, Lq, Hq, D], None); 0 at padding.

    Raises:
        ConfigurationError: dropout, soft cap, sinks or a mask that is not causal.
        InvalidInputError: a 4-D mask, or padding inside a sequence.
    """
    _refuse(module, dropout, kwargs)
    batch, heads, _, width = query.shape
    params = AttentionParameters(
        num_heads=heads,
        num_kv_heads=key.shape[1],
        head_dim=width,
        scale=width**-0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
    )
    impl = choose_implementation("attention", query.device.type)
    layout = _layout(query, key, attention_mask, kwargs.get("position_ids"))
    q, k, v = (
        x.transpose(1, 2).flatten(0, 1).index_select(0, rows)
        for x, rows in ((query, layout.queries), (key, layout.keys), (value, layout.keys))
    )
    plan = layout.plan(params, impl)
    out = _attention(q, k, v, layout.cu_seqlens_q, layout.cu_seqlens_k, params, impl, plan)
    full = out.new_zeros(batch * query.shape[2], heads, width)
    out = full.index_copy(0, layout.queries, out)
    return out.view(batch, query.shape[2], heads, width), None


def _refuse(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    violations = []
    if dropout:
        violations.append(f"attention_dropout={dropout}: set it to 0")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        violations.append("is_causal=False: only causal attention is served")
    for name, what in (("softcap", "soft cap"), ("s_aux", "sink"), ("sinks", "sink")):
        if kwargs.get(name) is not None:
            violations.append(f"{name}: no program computes a {what}")
    if violations:
        raise ConfigurationError(violations, f"attn_implementation={NAME!r}")


def _layout(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> _Layout:
    shape = (query.shape[0], query.shape[2], key.shape[2], query.device)
    same = (shape, _identity(mask), _identity(position_ids))
    if _last and _last[0].key == same:
        return _last[0]
    layout = _find_sequences(same, shape[0], shape[1], shape[2], query.device, mask, position_ids)
    _last[:] = [layout]
    # The tensors stay alive with the layout, so their identity is not given to others.
    layout.held = (mask, position_ids)
    return layout


def _identity(tensor: torch.Tensor | None) -> tuple[int, int] | None:
    return None if tensor is None else (id(tensor), tensor._version)


def _find_sequences(
    same: tuple[Any, ...],
    batch: int,
    q_length: int,
    kv_length: int,
    device: torch.device,
    mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> _Layout:
    if mask is not None and tuple(mask.shape) != (batch, kv_length):
        raise invalid(
            "attention_forward",
            "attention_mask",
            f"of shape {(batch, kv_length)}",
            tuple(mask.shape),
            "Give the model the 2-D padding mask; causality is built in",
        )
    real = torch.ones(batch, kv_length, dtype=torch.bool, device=device)
    if mask is not None:
        real = mask.to(device) != 0
    starts = real.clone()
    starts[:, 1:] &= ~real[:, :-1]
    if bool((starts.sum(1) > 1).any()):
        raise invalid(
            "attention_forward",
            "attention_mask",
            "one run of ones a row",
            "a gap",
            "Pad on one side only",
        )
    if position_ids is not None and q_length == kv_length:
        starts |= real & (position_ids.to(device).expand(batch, q_length) == 0)
    asked = real[:, kv_length - q_length :]
    keys = real.flatten().nonzero().squeeze(1)
    queries = asked.flatten().nonzero().squeeze(1)
    cu_k = _borders(starts.flatten()[keys].nonzero().squeeze(1), keys.numel())
    cu_q = cu_k
    if q_length != kv_length:
        counts = asked.sum(1)[real.any(1)]
        cu_q = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    return _Layout(same, queries, keys, cu_q, cu_k)


def _borders(starts: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat((starts, starts.new_full((1,), count))).int()


@torch.compiler.disable  # Dynamo would trace into plans and compiled kernels, and fails there
def experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Experts for transformers' `ExpertsInterface`; see `consistent_kernels.experts` for the op.

    Args:
        module: holds `gate_up_proj` [E, 2 I, H], gate before up, and `down_proj` [E, H, I].
        hidden_states: [T, H].
        top_k_index: [T, K] integers.
        top_k_weights: [T, K], any float dtype, read as fp32.

    Returns:
        [T, H], summed in fp32 over ascending slots and rounded once.

    Raises:
        ConfigurationError: biases, other layouts of the weights, experts that transformers shards
            over ranks, or another gate than SwiGLU, DeepSeek-V4's clamped one included.
    """
    violations = [
        f"{name}={value}: {why}"
        for name, value, wanted, why in (
            ("has_bias", getattr(module, "has_bias", False), False, "experts have no bias"),
            ("is_transposed", getattr(module, "is_transposed", False), False, "as nn.Linear"),
            ("is_concatenated", getattr(module, "is_concatenated", True), True, "gate before up"),
            ("has_gate", getattr(module, "has_gate", True), True, "only SwiGLU is served"),
        )
        if value != wanted
    ]
    if not isinstance(getattr(module, "act_fn", None), (SiLUActivation, nn.SiLU)):
        violations.append(f"act_fn={getattr(module, 'act_fn', None)}: only SiLU is served")
    plan = getattr(module, "_hf_tp_plan", None)
    if plan is not None:
        # transformers' ranks name a stranger's expert by an id past the last, and all-reduce sums.
        violations.append(f"tp_plan {plan!r}: sums over ranks are in no slot's order")
    limit = None
    gate = getattr(type(module), "_apply_gate", _default_apply_gate)
    if gate is DeepseekV4Experts._apply_gate:
        limit = module.limit
    elif gate is not _default_apply_gate:
        name = f"_apply_gate of {type(module).__name__}"
        violations.append(f"{name}: SwiGLU with or without DeepSeek-V4's clamp is served")
    if violations:
        raise ConfigurationError(violations, f"experts_implementation={NAME!r}")
    impl = choose_implementation("experts", hidden_states.device.type)
    # Made anew in every call: without a weight version a kept copy could be stale.
    prepared = tuple(
        prepare_expert_weight(weight, dtype=hidden_states.dtype, impl=impl)
        for weight in (module.gate_up_proj, module.down_proj)
    )
    return _experts(
        hidden_states,
        module.gate_up_proj,
        module.down_proj,
        top_k_index,
        top_k_weights.float(),
        None,
        prepared,
        limit,
        impl,
    )
