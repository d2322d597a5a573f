"""megatron-core modules whose forward runs the engine's ops.

Inputs are [s, b, h] (or [t, 1, h] packed); the ops see packed rows. `add_residual` adds in bf16
before a norm reads the sum: the same one rounding as in the engine's fused norm.
Parameters, names and checkpoints are megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from consistent_kernels.errors import ConfigurationError, invalid
from train_bridge.functions.attention import AttentionFunction
from train_bridge.functions.embedding import EmbeddingFunction
from train_bridge.functions.linear import LinearFunction
from train_bridge.functions.rms_norm import RMSNormFunction
from train_bridge.functions.rotary import RotaryFunction
from train_bridge.functions.silu_and_mul import SiluAndMulFunction
from train_bridge.functions.token_logprobs import TokenLogprobsFunction
from train_bridge.megatron.conversion import qkv_sizes
from train_bridge.megatron.functions import FusedQKVFunction
from train_bridge.megatron.state import BatchLayout, MegatronState
from train_bridge.modules import Bridged, Gemm, Scoring
from train_bridge.weight_version import MODEL_DTYPE

_linear = LinearFunction.apply
_fused_qkv = FusedQKVFunction.apply
_embedding = EmbeddingFunction.apply
_rms_norm = RMSNormFunction.apply
_rotary = RotaryFunction.apply
_silu_and_mul = SiluAndMulFunction.apply
_attention = AttentionFunction.apply
_token_logprobs = TokenLogprobsFunction.apply


class MegatronModule(Bridged):
    """A module that `bridge_gpt_model` gives its state."""

    _bridge: MegatronState

    @property
    def state(self) -> MegatronState:
        """The model's; raises ConfigurationError before `bridge_gpt_model`."""
        found = self.__dict__.get("_bridge")
        if found is None:
            raise ConfigurationError(
                [f"{type(self).__name__} has no contract; call bridge_gpt_model on the GPTModel"],
                "megatron model",
            )
        return found


def _multiply(module: Any, x: torch.Tensor) -> torch.Tensor:
    """[..., K] times the module's weight, with its bias."""
    state, name = module.state, module._bridge_name
    flat = x.reshape(-1, x.shape[-1])
    weight = state.prepared_weight(name, module.weight)
    # One GEMM; as in the engine several, where a cut falls inside a block of columns.
    sizes = state.parts.get(name) or [weight.shape[0]]
    impl, rows = state.impl("linear"), state.rows.get(name)
    prepared = weight.split(sizes)
    if rows is None:
        # Only q, k and v have a bias.
        masters = module.weight.split(sizes) if len(sizes) > 1 else [module.weight]
        parts = [
            _linear(flat, master, module.bias, part, impl, None)
            for master, part in zip(masters, prepared, strict=True)
        ]
    else:
        rows = state.rows[name] = rows.to(x.device)
        parts = [
            _fused_qkv(flat, module.weight, module.bias, part, of, impl)
            for part, of in zip(prepared, rows.split(sizes), strict=True)
        ]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    state.watch(y, name, module.weight)
    return y.view(*x.shape[:-1], -1)


class VllmLinear(MegatronModule):
    """What both linears share."""

    def gemms(self) -> Iterator[Gemm]:
        """Yield its GEMMs: several where a cut falls inside a block of columns."""
        if self.bias is None:
            rows, inner = self.weight.shape
            for columns in self.state.parts.get(self._bridge_name) or [rows]:
                yield Gemm(columns, inner)


class VllmColumnParallelLinear(VllmLinear, tensor_parallel.ColumnParallelLinear):
    """y = round(x round(W)^T + b). A fused qkv comes out as q, k, v (see `SelfAttention` below)."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[s, b, K] to ([s, b, N], None); the bias is added inside."""
        return _multiply(self, input_), None

    def backward_dw(self) -> None:
        """Nothing is left to do: the backward has computed the weight's gradient."""


class VllmRowParallelLinear(VllmLinear, tensor_parallel.RowParallelLinear):
    """y = round(x round(W)^T + b)."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[s, b, K] to ([s, b, N], None)."""
        return _multiply(self, input_), None

    def backward_dw(self) -> None:
        """Nothing is left to do: the backward has computed the weight's gradient."""


class VllmLayerNormColumnParallelLinear(VllmColumnParallelLinear):
    """linear(rms_norm(x)); the norm's weight is `layer_norm_weight`, as in Transformer Engine."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[s, b, K] to ([s, b, N], None)."""
        eps, impl = self.config.layernorm_epsilon, self.state.impl("rms_norm")
        return super().forward(_rms_norm(input_, self.layer_norm_weight, eps, impl))


class VllmRMSNorm(MegatronModule, nn.Module):
    """y = rms_norm(x) over the last dimension, fp32 through the weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.config = config  # Megatron-Bridge asks the module that owns a weight
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]."""
        return _rms_norm(x, self.weight, self.eps, self.state.impl("rms_norm"))


def new_weight(config: TransformerConfig, shape: tuple[int, ...]) -> nn.Parameter:
    """Return an uninitialized parameter where the configuration puts parameters."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))


def _norm_weight(config: TransformerConfig, size: int) -> nn.Parameter:
    weight = new_weight(config, (size,))
    nn.init.ones_(weight)
    return weight


class VllmSiluAndMul(MegatronModule, nn.Module):
    """[..., 2 I], gate then up, to silu(gate) * up [..., I]; fp32 with one rounding."""

    def __init__(self, *, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 I] to [..., I]."""
        gate, up = gate_up.reshape(-1, gate_up.shape[-1]).chunk(2, dim=-1)
        y = _silu_and_mul(gate, up, self.state.impl("silu_and_mul"))
        return y.view(*gate_up.shape[:-1], -1)


class VllmMLP(MLP):
    """down(silu(gate(x)) * up(x)), whatever `use_te_activation_func` says."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        if options.get("ffn_hidden_size") is None:
            options["ffn_hidden_size"] = config.ffn_hidden_size
        super().__init__(config, *args, **options)
        self.activation_func = VllmSiluAndMul(config=config)

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """[s, b, H] to ([s, b, H], None)."""
        if per_token_scale is not None:
            raise invalid("VllmMLP", "per_token_scale", None, "a tensor", "Experts are not bridged")
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(self.activation_func(gate_up))


class VllmCoreAttention(MegatronModule, nn.Module):
    """Causal attention inside each sequence; bits as in the engine."""

    serves = "attention"

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """[s, b, heads, D] to [s, b, heads * D], or packed [t, heads, D] to [t, heads * D]."""
        _refuse_mask(attention_mask, attention_bias)
        state = self.state
        columns = query.shape[1] if query.dim() == 4 else 1
        layout = state.layout(query.shape[0], columns, query.device, packed_seq_params)
        q, k, v = (_sequence_major(x, columns) for x in (query, key, value))
        cu = layout.cu_seqlens
        out = _attention(q, k, v, cu, cu, state.attention, state.impl("attention"), layout.plan)
        if query.dim() == 3:
            return out.reshape(query.shape[0], -1)
        out = out.reshape(columns, query.shape[0], -1)
        return out.transpose(0, 1)


def _sequence_major(x: torch.Tensor, columns: int) -> torch.Tensor:
    """[s, b, heads, D] or [t, heads, D] to [b * s, heads, D]."""
    if x.dim() == 3:
        return x
    return x.flatten(0, 1) if columns == 1 else x.transpose(0, 1).flatten(0, 1)


def _refuse_mask(mask: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    if mask is not None:
        raise invalid(
            "forward",
            "attention_mask",
            None,
            f"a tensor of shape {tuple(mask.shape)}",
            "Causality is built in; pack sequences (packed_seq_params, thd) instead of masking",
        )
    if bias is not None:
        raise invalid("forward", "attention_bias", None, "a tensor")


class VllmSelfAttention(SelfAttention):
    """q, k, v; q/k norm; rotation inside the op, from the model's own rope parameters."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        inference_context: Any = None,
        *_: Any,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """[s, b, H] to ([s, b, H], None). megatron-core's rotary tables are not read."""
        _refuse_mask(attention_mask, attention_bias)
        if key_value_states is not None or inference_context is not None:
            raise ConfigurationError(
                ["the trainer has no KV cache; generate with the engine"], "forward"
            )
        state = self.core_attention.state
        length, columns, _width = hidden_states.shape
        layout = state.layout(length, columns, hidden_states.device, packed_seq_params)
        q, k, v = self._projected(hidden_states, layout, state)
        if packed_seq_params is None:
            q, k, v = (x.view(length, columns, *x.shape[1:]) for x in (q, k, v))
        out = self.core_attention(
            q, k, v, None, attn_mask_type=self.attn_mask_type, packed_seq_params=packed_seq_params
        )
        return self.linear_proj(out.reshape(length, columns, -1))

    def _projected(
        self, hidden_states: torch.Tensor, layout: BatchLayout, state: MegatronState
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated q, k and v, each [s * b, heads, D]."""
        mixed, _ = self.linear_qkv(hidden_states)
        flat = mixed.reshape(layout.positions.shape[0], -1)
        q, k, v = (
            part.unflatten(1, (-1, state.attention.head_dim))
            for part in flat.split(qkv_sizes(state.facts), dim=1)
        )
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = _rotary(layout.positions, q, k, state.rope, state.impl("rotary"))
        return q, k, v


def add_residual(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Return megatron-core's bias-dropout-add without bias and dropout: one bf16 sum."""
    del training, fused

    def add(
        x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
    ) -> torch.Tensor:
        x, bias = x_with_bias
        if bias is not None or prob:
            raise ConfigurationError(
                [f"bias or dropout (p={prob}) beside the residual; the engine has neither"],
                "forward",
            )
        return x + residual

    return add


class VllmVocabParallelEmbedding(MegatronModule, tensor_parallel.VocabParallelEmbedding):
    """Rows of the rounded table."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """[b, s] ids to [b, s, H] in the model dtype."""
        impl = self.state.impl("embedding")
        y = _embedding(input_.reshape(-1), self.weight, MODEL_DTYPE, impl)
        return y.view(*input_.shape, -1)


class VllmOutputLayer(MegatronModule, tensor_parallel.ColumnParallelLinear):
    """The output head: fp32 logits, or scores of given tokens without logits."""

    serves = "head"

    def gemms(self) -> Iterator[Gemm]:
        """Yield its GEMM, padded vocabulary rows left out."""
        facts = self.state.facts
        yield Gemm(facts.vocab_size, facts.hidden_size, out_fp32=True, streamed=True)

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """[s, b, H] to ([s, b, V] fp32, None), V the vocabulary without padding."""
        state = self.state
        master, rows, prepared = self._weights(weight)
        flat = input_.reshape(-1, input_.shape[-1])
        logits = _linear(flat, rows, None, prepared, state.impl("linear"), torch.float32)
        state.watch(logits, self._bridge_name, master)
        return logits.view(*input_.shape[:-1], -1), None

    def score(
        self, hidden: torch.Tensor, weight: torch.Tensor | None, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] to (log-prob, entropy), each [N] fp32; see `train_bridge.modules.Scoring`."""
        state = self.state
        master, rows, prepared = self._weights(weight)
        if scoring.rows is not None:
            hidden = hidden.index_select(0, scoring.rows)
        logprob, _, entropy = _token_logprobs(
            hidden,
            rows,
            prepared,
            scoring.ids,
            scoring.temperature,
            scoring.valid_vocab,
            scoring.banned,
            scoring.entropy,
            state.impl("token_logprobs"),
            state.impl("linear"),
        )
        state.watch(logprob, self._bridge_name, master)
        return logprob, entropy

    def _weights(
        self, given: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the master, its rows of real vocabulary, and these prepared."""
        state = self.state
        master = self.weight if given is None else given
        prepared = state.prepared_weight(state.head, master, torch.float32)
        padded = master.shape[0] != state.facts.vocab_size
        return master, master[: state.facts.vocab_size] if padded else master, prepared
