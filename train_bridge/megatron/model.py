"""Gives a GPTModel built from our spec its contract, embedding, final norm and output head."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from consistent_kernels.attention import AttentionParameters
from consistent_kernels.contract import Contract, check_same
from consistent_kernels.errors import ConfigurationError
from consistent_kernels.model_facts import ModelFacts, model_facts
from consistent_kernels.resolve import resolve_contract
from consistent_kernels.rotary import RopeParameters
from consistent_kernels.router import RouterParameters
from train_bridge.causal_lm import pack_for
from train_bridge.masters import served_quantization
from train_bridge.megatron.conversion import hf_named
from train_bridge.megatron.layers import (
    MegatronModule,
    VllmMLP,
    VllmOutputLayer,
    VllmRMSNorm,
    VllmSelfAttention,
    VllmVocabParallelEmbedding,
)
from train_bridge.megatron.moe import VllmGroupedLinear, VllmMoELayer
from train_bridge.megatron.refusals import config_violations, disagreements
from train_bridge.megatron.state import MegatronState
from train_bridge.modules import Scoring, unwrapped
from train_bridge.packing import PackedBatch
from train_bridge.start import prepare_head, prepare_kernels

_MASTER_DTYPES = (torch.float32, torch.bfloat16)
_CONTAINERS = (
    nn.ModuleList,
    nn.Dropout,
    IdentityOp,
    IdentityFuncOp,
    LanguageModelEmbedding,
    TransformerBlock,
    TransformerLayer,
    VllmSelfAttention,
    VllmMLP,
    VllmMoELayer,
    VllmGroupedLinear,
)
_BRIDGED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hook: Any = None


class ConsistentGPTModel(MegatronModule, GPTModel):
    """GPTModel with logits in fp32, and with scores of given tokens without logits."""

    containers = _CONTAINERS

    def forward(
        self, *args: Any, batch: PackedBatch | None = None, scoring: Any = None, **kwargs: Any
    ) -> Any:
        """As GPTModel.forward; with a `batch` and a `scoring`: (log-prob, entropy), each [N] fp32.

        Raises:
            ConfigurationError: `labels` is given: megatron-core's loss has other log-probs.
        """
        if batch is None:
            ids = args[0] if args else kwargs["input_ids"]
            prepare_kernels(self, self.state, ids.numel())
            prepare_head(self, self.state, ids.numel())
            return super().forward(*args, **kwargs)
        prepare_kernels(self, self.state, batch.num_tokens)
        lengths = torch.tensor(batch.offsets).diff()
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=int(lengths.max()),
            max_seqlen_kv=int(lengths.max()),
        )
        return super().forward(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            attention_mask=None,
            packed_seq_params=packed,
            output_processor=_score,
            output_processor_context=scoring,
        )

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> Any:
        """Refuse: megatron-core's cross entropy sums in another order than the engine."""
        raise ConfigurationError(
            ["labels: take the loss from train_bridge.token_logprobs instead"], "forward"
        )

    def pack(self, *args: Any) -> PackedBatch:
        """Return the packed form of a batch; see `train_bridge.packing.pack`."""
        return pack_for(self.state, *args)

    def hf_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, parameter); fused ones are cut."""
        with torch.no_grad():
            yield from hf_named(dict(self.named_parameters()), self.state.facts)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in PyTorch; the weights count as changed."""
        result = super().load_state_dict(*args, **kwargs)
        self.state.version.bump()
        return result


def _score(
    *, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, context: Any, **_: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scoring: Scoring = context
    return output_layer.score(hidden_states.squeeze(1), output_weight, scoring)


def pre_wrap_hook(
    hf_config: Any, *, contract: Contract | None = None
) -> Callable[[list[nn.Module]], list[nn.Module]]:
    """Return `bridge_gpt_model` for Megatron-Bridge's `provider.register_pre_wrap_hook`."""

    def bridge(models: list[nn.Module]) -> list[nn.Module]:
        return [bridge_gpt_model(model, hf_config, contract=contract) for model in models]

    return bridge


def bridge_gpt_model(
    model: nn.Module,
    hf_config: Any,
    *,
    contract: Contract | None = None,
    device_type: str | None = None,
) -> nn.Module:
    """Give a GPTModel built from `get_gpt_layer_vllm_spec` the forward of the engine, in place.

    Embedding, final norm and output layer, which no layer spec reaches, change their class;
    parameters and names stay. Call it before DDP and the optimizer. Any step of any PyTorch
    optimizer counts as new weights afterwards: megatron-core's optimizers step on copies.

    Args:
        model: GPTModel, fp32 or bf16 parameters, TP 1 and PP 1.
        hf_config: the Hugging Face configuration of the same model; the contract is resolved from
            it, as the engine's is.
        contract: the engine's, whose implementations are taken; resolved when None.
        device_type: "cpu" or "cuda", where the forward will run; where the parameters are, by
            default.

    Returns:
        The same object.

    Raises:
        ConfigurationError: everything about the model that no contract covers, at once.
        ContractMismatchError: this side would compute something else than `contract` says.
    """
    inner = unwrapped(model)
    state = inner.state if isinstance(inner, ConsistentGPTModel) else None
    if state is None:
        state = _new_state(inner, hf_config, device_type, contract)
    if contract is not None:
        check_same(state.contract, contract, ours_is="this trainer", theirs_is="the engine")
    if not isinstance(inner, ConsistentGPTModel):
        _attach(inner, state)
        _follow_optimizers(inner)
    return model


def _new_state(
    model: nn.Module, hf_config: Any, device_type: str | None, contract: Contract | None
) -> MegatronState:
    if not isinstance(model, GPTModel):
        raise ConfigurationError(
            [f"class {type(model).__name__}: give a megatron-core GPTModel"], "megatron model"
        )
    violations = config_violations(model.config)
    facts: ModelFacts | None = None
    try:
        facts = model_facts(hf_config, "bfloat16")
    except ConfigurationError as error:
        violations += error.violations
    if facts is not None:
        if served_quantization(hf_config, None):
            violations.append("block-FP8 models are not bridged yet; bridge the Hugging Face model")
        violations += disagreements(model.config, facts, hf_config)
        violations += _model_violations(model, facts, hf_config)
    device = device_type or next((p.device.type for p in model.parameters()), "unknown")
    if device not in ("cpu", "cuda"):
        violations.append(f"parameters are on {device!r}; give device_type 'cpu' or 'cuda'")
    if violations:
        raise ConfigurationError(violations, "megatron model")
    return MegatronState(
        contract=resolve_contract(facts, device, like=contract),
        facts=facts,
        device_type=device,
        rope=RopeParameters.from_hf_config(hf_config),
        attention=AttentionParameters(
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            scale=facts.head_dim**-0.5,
            sliding_window=facts.sliding_window,
        ),
        router=RouterParameters.from_hf_config(hf_config) if facts.moe else None,
        head="embedding.word_embeddings" if facts.tie_word_embeddings else "output_layer",
    )


def _model_violations(model: GPTModel, facts: ModelFacts, hf_config: Any) -> list[str]:
    found = []
    if not (model.pre_process and model.post_process):
        found.append("a pipeline stage: embedding and output layer must be in the model")
        return found
    if model.position_embedding_type not in ("rope", "none"):
        found.append(f"position_embedding_type={model.position_embedding_type!r}: use 'rope'")
    rope = getattr(hf_config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta")
    if model.position_embedding_type == "rope" and theta and model.rotary_base != theta:
        found.append(f"rotary_base={model.rotary_base}, but rope_theta={theta}")
    if bool(model.share_embeddings_and_output_weights) != facts.tie_word_embeddings:
        found.append(
            "share_embeddings_and_output_weights="
            f"{model.share_embeddings_and_output_weights}, but tie_word_embeddings="
            f"{facts.tie_word_embeddings}"
        )
    if model.vocab_size < facts.vocab_size:
        found.append(f"vocab_size={model.vocab_size}, but {facts.vocab_size} ids exist")
    dtypes = {p.dtype for p in model.parameters()} - set(_MASTER_DTYPES)
    if dtypes:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        found.append(f"parameters of {names} are not supported; use float32 or bfloat16")
    foreign = [
        f"{name} ({type(module).__name__})"
        for name, module in model.decoder.layers.named_modules()
        if not isinstance(module, (MegatronModule, *_CONTAINERS))
    ]
    if foreign:
        found.append(f"layers not built from get_gpt_layer_vllm_spec: {', '.join(foreign[:8])}")
    return found


def _attach(model: GPTModel, state: MegatronState) -> None:
    model.__class__ = ConsistentGPTModel
    model.embedding.word_embeddings.__class__ = _swapped(
        model.embedding.word_embeddings, VocabParallelEmbedding, VllmVocabParallelEmbedding
    )
    model.output_layer.__class__ = _swapped(
        model.output_layer, ColumnParallelLinear, VllmOutputLayer
    )
    if not isinstance(model.decoder.final_layernorm, VllmRMSNorm):
        norm = VllmRMSNorm(model.config, state.facts.hidden_size, model.config.layernorm_epsilon)
        norm.weight = model.decoder.final_layernorm.weight
        model.decoder.final_layernorm = norm
    # Positions are rotated inside our op; megatron-core's tables would be computed for nothing.
    model.position_embedding_type = "none"
    for name, module in model.named_modules():
        if not isinstance(module, MegatronModule):
            continue
        module._bridge = state
        module._bridge_name = name or type(module).__name__
        state.note_fused(name)


def _swapped(module: nn.Module, stock: type, ours: type) -> type:
    if type(module) is not stock:
        raise ConfigurationError(
            [f"{type(module).__name__} stands where {stock.__name__} is expected"], "megatron model"
        )
    return ours


def _follow_optimizers(model: nn.Module) -> None:
    global _hook
    _BRIDGED.add(model)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_any_step)


def _after_any_step(*_: Any) -> None:
    # The copy from fp32 masters into the model follows at once, before any forward.
    for model in list(_BRIDGED):
        model.state.version.bump()
