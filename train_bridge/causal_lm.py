"""Forwards of the decoder stack and of the language model, mixed into the Hugging Face classes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput

from consistent_kernels.errors import ConfigurationError, invalid
from train_bridge.modules import Bridged, Scoring
from train_bridge.packing import PackedBatch, pack
from train_bridge.start import prepare_head, prepare_kernels
from train_bridge.state import BridgeState
from train_bridge.weights import follow_optimizers, forget_gathered

_SERVED_BY_THE_ENGINE = "the trainer has no KV cache; generate with the engine"
_IGNORED = frozenset({"num_items_in_batch", "max_length_q", "max_length_k", "cache_position"})


@dataclasses.dataclass
class ConsistentCausalLMOutput(ModelOutput):
    """As Hugging Face's CausalLMOutput, with scores of given tokens.

    Attributes:
        loss: where `labels` were given.
        logits: [B, L, V] fp32, 0 at padding; None where tokens were scored instead.
        log_probs: [B, L] fp32 of `shift_labels`; 0 where none was asked for. verl's name.
        entropy: [B, L] fp32.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


class DecoderForward(Bridged):
    """The stack of layers."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        cu_seq_lens_q: torch.Tensor | None = None,
        batch: PackedBatch | None = None,
        **rest: Any,
    ) -> torch.Tensor | BaseModelOutputWithPast:
        """[B, L] ids to the last hidden state [B, L, H]; a `batch` to a packed [T, H]."""
        refuse_unsupported(rest)
        packed = batch or self.pack(input_ids, attention_mask, position_ids, cu_seq_lens_q)
        state = self._bridge
        packed = packed.planned(state.attention, state.impl("attention"))
        hidden, residual = self.embed_tokens(packed.ids), None
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden, residual = layer(hidden, residual, packed)
        hidden, _ = self.norm(hidden, residual)
        # The last line of defence: recomputed layers would note the new version, this does not.
        state.watch(hidden, self._bridge_name)
        if batch is not None:
            return hidden
        return BaseModelOutputWithPast(last_hidden_state=packed.unpack(hidden))

    def pack(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> PackedBatch:
        """Return the packed form of a batch; see `train_bridge.packing.pack`."""
        return pack_for(self._bridge, input_ids, attention_mask, position_ids, cu_seqlens)


def pack_for(
    state: BridgeState,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> PackedBatch:
    """Return the packed form of a batch for a model of this state."""
    if input_ids is None:
        raise invalid("forward", "input_ids", "token ids", None, "Embeddings are not accepted")
    if input_ids.device.type != state.device_type:
        raise invalid(
            "forward",
            "input_ids",
            f"on {state.device_type}, for which the contract was resolved",
            f"on {input_ids.device}",
            "Give bridge_model the device_type of the forward",
        )
    return pack(
        input_ids,
        attention_mask,
        position_ids,
        cu_seqlens,
        vocab_size=state.facts.vocab_size,
        max_position=state.rope.max_position,
    )


class CausalLMForward(Bridged):
    """The language model: logits, or log-probs of given tokens without logits."""

    def pack(self, *args: Any) -> PackedBatch:
        """Return the packed form of a batch; see `train_bridge.packing.pack`."""
        return self.model.pack(*args)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        shift_labels: torch.Tensor | None = None,
        temperature: float | torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cu_seq_lens_q: torch.Tensor | None = None,
        return_dict: bool | None = None,
        batch: PackedBatch | None = None,
        scoring: Scoring | None = None,
        **rest: Any,
    ) -> Any:
        """Score or return logits.

        Args:
            input_ids, attention_mask, position_ids, cu_seq_lens_q: see `train_bridge.packing.pack`.
            labels: [B, L], for Hugging Face's loss on fp32 logits.
            shift_labels: [B, L], the token to score at each position (verl's fused interface);
                negative ones are not scored. The next token by default, given a `temperature`.
            temperature: one number, or a float32 tensor [B], [B, 1] or [B, L].
            logits_to_keep: as in Hugging Face.
            batch, scoring: a packed batch and what to score of it; returns (log-prob, entropy) [N].
        """
        refuse_unsupported(rest)
        self._bridge.sharded = is_sharded(self)
        packed = batch or self.model.pack(input_ids, attention_mask, position_ids, cu_seq_lens_q)
        prepare_kernels(self, self._bridge, packed.num_tokens)
        if batch is not None:
            if scoring is None:
                prepare_head(self, self._bridge, packed.num_tokens)
            return self.lm_head(self.model(batch=batch), scoring)
        hidden = self.model(batch=packed)
        if shift_labels is not None or temperature is not None:
            output = self._score(hidden, packed, shift_labels, temperature)
        else:
            output = self._logits(hidden, packed, labels, logits_to_keep, rest)
        return output.to_tuple() if return_dict is False else output

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch; the weights count as changed."""
        result = super().load_state_dict(*args, **kwargs)
        self._bridge.version.bump()
        forget_gathered(self)
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or unpickled model is followed too.
        super().__setstate__(state)
        follow_optimizers(self)

    def _logits(
        self,
        hidden: torch.Tensor,
        packed: PackedBatch,
        labels: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
        rest: dict[str, Any],
    ) -> ConsistentCausalLMOutput:
        keep = packed.kept(logits_to_keep)
        rows = packed.num_tokens if keep is None else keep.rows.numel()
        prepare_head(self, self._bridge, rows)
        if keep is None:
            logits = packed.unpack(self.lm_head(hidden))
        else:
            logits = keep.unpack(self.lm_head(hidden.index_select(0, keep.rows)))
        loss = None
        if labels is not None:
            items = {"num_items_in_batch": rest.get("num_items_in_batch")}
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **items
            )
        return ConsistentCausalLMOutput(loss=loss, logits=logits)

    def _score(
        self,
        hidden: torch.Tensor,
        packed: PackedBatch,
        shift_labels: torch.Tensor | None,
        temperature: float | torch.Tensor | None,
    ) -> ConsistentCausalLMOutput:
        ids = packed.next_ids() if shift_labels is None else packed.take(shift_labels).long()
        rows = (ids >= 0).nonzero().squeeze(1)
        scoring = Scoring(
            rows=rows,
            ids=ids.index_select(0, rows),
            temperature=packed.per_token(temperature, rows),
        )
        columns = self.lm_head(hidden, scoring)
        log_probs, entropy = (
            packed.unpack(column.new_zeros(packed.num_tokens).index_copy(0, rows, column))
            for column in columns
        )
        return ConsistentCausalLMOutput(log_probs=log_probs, entropy=entropy)


def refuse_unsupported(rest: dict[str, Any]) -> None:
    """Raise ConfigurationError naming every argument that the bridged forward does not serve."""
    violations = []
    for name, value in rest.items():
        if name in _IGNORED or value is None or value is False or name == "cu_seq_lens_k":
            continue
        why = {
            "past_key_values": _SERVED_BY_THE_ENGINE,
            "use_cache": _SERVED_BY_THE_ENGINE,
            "inputs_embeds": "pass input_ids; embedding is part of the contract",
        }.get(name, "the bridged forward does not know it")
        violations.append(f"{name}: {why}")
    if violations:
        raise ConfigurationError(violations, "forward")


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether FSDP2 manages some of the model's parameters."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
