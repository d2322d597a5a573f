"""Forwards of the modules of a dense decoder on our ops; mixed into the Hugging Face classes.

Every activation is a packed [T, H] in the model dtype. The residual travels beside the hidden state
and is added inside the norm, as in the engine. A module reads its parameters from itself alone, so
that FSDP2's hooks (which gather them around each module's forward) keep working.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from train_bridge.functions.attention import AttentionFunction
from train_bridge.functions.embedding import EmbeddingFunction
from train_bridge.functions.linear import LinearFunction
from train_bridge.functions.rms_norm import AddRMSNormFunction, RMSNormFunction
from train_bridge.functions.rotary import RotaryFunction
from train_bridge.functions.silu_and_mul import SiluAndMulFunction
from train_bridge.functions.token_logprobs import TokenLogprobsFunction
from train_bridge.packing import PackedBatch
from train_bridge.state import BridgeState
from train_bridge.weight_version import MODEL_DTYPE

_linear = LinearFunction.apply
_embedding = EmbeddingFunction.apply
_rms_norm = RMSNormFunction.apply
_add_rms_norm = AddRMSNormFunction.apply
_rotary = RotaryFunction.apply
_silu_and_mul = SiluAndMulFunction.apply
_attention = AttentionFunction.apply
_token_logprobs = TokenLogprobsFunction.apply


class Scoring:
    """Which tokens to score from which rows of the hidden state.

    A plain class: FSDP2 casts float tensors in pytrees and dataclasses, and would round a
    temperature to bf16.

    Attributes:
        rows: [N] int64, rows of the hidden state, or None for all.
        ids: [N] int64, the token scored from each.
        temperature: one number, or [N] fp32.
        valid_vocab: ids from here on are impossible; None means the whole vocabulary exists.
        banned: impossible ids, [n] integers or a bool mask [V].
        entropy: whether to compute it.
    """

    def __init__(
        self,
        rows: torch.Tensor | None,
        ids: torch.Tensor,
        temperature: float | torch.Tensor = 1.0,
        valid_vocab: int | None = None,
        banned: torch.Tensor | None = None,
        entropy: bool = True,
    ) -> None:
        self.rows = rows
        self.ids = ids
        self.temperature = temperature
        self.valid_vocab = valid_vocab
        self.banned = banned
        self.entropy = entropy


class Gemm(NamedTuple):
    """y [M, columns] = x [M, inner] W^T, fp32 or in the model dtype; over tiles of rows where
    `streamed`."""

    columns: int
    inner: int
    out_fp32: bool = False
    streamed: bool = False


class Bridged:
    """What `bridge_model` puts on a module beside its new class."""

    _bridge: BridgeState
    _bridge_name: str
    containers: tuple[type[nn.Module], ...] = ()
    """Of a model: module classes that hold others and compute nothing; a report passes them by."""
    serves: str = ""
    """What a report lists by name: "attention" or "head"."""

    def hf_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, parameter) of a bridged model."""
        yield from self.named_parameters()

    def gemms(self) -> Iterator[Gemm]:
        """Yield the GEMMs of this module's own forward, without those that have a bias."""
        yield from ()

    def expert_stack(self) -> tuple[int, int, int] | None:
        """Return (E, H, I) of the experts that this module's own forward runs in bf16, or None."""
        return None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the bridged model inside DDP's, Megatron's or torch.compile's wrappers; else the
    innermost module.
    """
    while not isinstance(model, Bridged):
        inner = getattr(model, "module", getattr(model, "_orig_mod", None))
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


class LinearForward(Bridged):
    """nn.Linear as y = round(x round(W)^T + b)."""

    def gemms(self) -> Iterator[Gemm]:
        """Yield its GEMM."""
        if self.bias is None:
            yield Gemm(*self.weight.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] in the model dtype to [T, N]."""
        state = self._bridge
        weight = state.prepared_weight(self._bridge_name, self.weight)
        y = _linear(x, self.weight, self.bias, weight, state.impl("linear"), None)
        state.watch(y, self._bridge_name, self.weight)
        return y


class LMHeadForward(Bridged):
    """nn.Linear as the output head: fp32 logits, or scores of given tokens without logits."""

    serves = "head"

    def gemms(self) -> Iterator[Gemm]:
        """Yield its GEMM."""
        yield Gemm(*self.weight.shape, out_fp32=True, streamed=True)

    def forward(
        self, hidden: torch.Tensor, scoring: Scoring | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """[T, H] to logits [T, V] fp32, or to (log-prob, entropy), each [N] fp32."""
        state = self._bridge
        hidden = hidden.to(MODEL_DTYPE)
        weight = state.prepared_weight(self._bridge_name, self.weight, torch.float32)
        if scoring is None:
            logits = _linear(hidden, self.weight, None, weight, state.impl("linear"), torch.float32)
            state.watch(logits, self._bridge_name, self.weight)
            return logits
        if scoring.rows is not None:
            hidden = hidden.index_select(0, scoring.rows)
        logprob, _, entropy = _token_logprobs(
            hidden,
            self.weight,
            weight,
            scoring.ids,
            scoring.temperature,
            scoring.valid_vocab,
            scoring.banned,
            scoring.entropy,
            state.impl("token_logprobs"),
            state.impl("linear"),
        )
        state.watch(logprob, self._bridge_name, self.weight)
        return logprob, entropy


class EmbeddingForward(Bridged):
    """nn.Embedding: rows of the rounded table; as there, `padding_idx` receives no gradient."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] to [T, H] in the model dtype."""
        y = _embedding(ids, self.weight, MODEL_DTYPE, self._bridge.impl("embedding"))
        if self.padding_idx is not None and y.requires_grad:
            padding = (ids == self.padding_idx).unsqueeze(1)
            y.register_hook(lambda grad: grad.masked_fill(padding, 0))
        return y


class RMSNormForward(Bridged):
    """RMSNorm, fp32 through the weight; with a residual, of the rounded sum."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """y = norm(x), or (norm(x + residual), x + residual)."""
        impl, eps = self._bridge.impl("rms_norm"), self.variance_epsilon
        if residual is None:
            return _rms_norm(x, self.weight, eps, impl)
        return _add_rms_norm(x, residual, self.weight, eps, impl)


class MLPForward(Bridged):
    """down(silu(gate(x)) * up(x))."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        impl = self._bridge.impl("silu_and_mul")
        return self.down_proj(_silu_and_mul(self.gate_proj(x), self.up_proj(x), impl))


class AttentionForward(Bridged):
    """Causal attention inside each sequence of the packed batch; with q/k norm for Qwen3."""

    serves = "attention"

    def forward(self, x: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """[T, H] to [T, H]."""
        state = self._bridge
        tokens, head_dim = x.shape[0], state.attention.head_dim
        q = self.q_proj(x).view(tokens, -1, head_dim)
        k = self.k_proj(x).view(tokens, -1, head_dim)
        v = self.v_proj(x).view(tokens, -1, head_dim)
        if state.facts.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotary(batch.positions, q, k, state.rope, state.impl("rotary"))
        cu = batch.cu_seqlens
        out = _attention(q, k, v, cu, cu, state.attention, state.impl("attention"), batch.plan)
        return self.o_proj(out.reshape(tokens, -1))


class DecoderLayerForward(Bridged):
    """One layer; (hidden, residual) in and out, the residual sum pending as in the engine."""

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] each; `residual` is None before the first layer."""
        hidden = hidden.to(MODEL_DTYPE)
        if residual is None:
            residual = hidden
            x = self.input_layernorm(hidden)
        else:
            x, residual = self.input_layernorm(hidden, residual.to(MODEL_DTYPE))
        x = self.self_attn(x, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual
