"""verl's FSDP2 engine with our model and our log-probs.

What is verl's stays: loading, sharding, mixed precision, micro-batches, optimizer, checkpoints and
the loss. Ours are three places: the module (bridged before FSDP2 wraps it), the inputs and outputs
of its forward, and the weight stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.rollout.utils import get_vision_placeholder_token_ids

from consistent_kernels.errors import ConfigurationError
from consistent_kernels.model_facts import model_facts
from consistent_kernels.protocol.handover import Handover
from consistent_kernels.resolve import resolve_contract
from train_bridge.determinism import deterministic_gradients
from train_bridge.hf import bridge_model
from train_bridge.verl.scoring import score_request
from train_bridge.verl.weight_stream import weight_stream


class ConsistentFSDPEngineWithLMHead(FSDPEngineWithLMHead):
    """`FSDPEngineWithLMHead` whose log-probs are the rollout's, bit for bit.

    Registered for backend fsdp2 under the vendor "train_bridge" (see `registry.activate`).
    Micro-batches are always packed; `use_remove_padding` makes no difference to any bit.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        _refuse(model_config, engine_config)
        self.served = False
        super().__init__(model_config, engine_config, *args, **kwargs)
        self._valid_vocab = len(model_config.tokenizer)
        self._banned_ids = get_vision_placeholder_token_ids(model_config.processor) or None

    def handover(self) -> Handover:
        """Return this rank's receipt and report; all ranks must take part."""
        *_, (_, record) = self.get_per_tensor_param()[0]
        return Handover.from_tensor(record)

    def _build_module(self) -> torch.nn.Module:
        module, device = super()._build_module(), get_device_name()
        program = getattr(self.engine_config, "program", None)
        contract = None
        if program is not None:
            facts = model_facts(module.config, "bfloat16", architecture=type(module).__name__)
            contract = resolve_contract(facts, device, only=program)
        return bridge_model(module, contract, device_type=device)

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's; a training step with deterministic gradients where they are asked for."""
        training = not (kwargs.get("forward_only") or (len(args) > 2 and args[2]))
        wanted = getattr(self.engine_config, "deterministic_gradients", False) and training
        switch = deterministic_gradients(get_device_name()) if wanted else contextlib.nullcontext()
        with switch:
            output = super().forward_backward_batch(*args, **kwargs)
        self.served = True
        return output

    def get_per_tensor_param(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """As verl's, in bf16, with a receipt at the end (see `weight_stream`)."""
        named, _ = super().get_per_tensor_param(*args, **kwargs)
        return weight_stream(self.module, named, served=self.served), None

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict]:
        """Return what the bridged forward takes: a packed batch, and which tokens to score."""
        vocab = min(self._valid_vocab, self.module.config.vocab_size)
        request = score_request(self.module, micro_batch, vocab, self._banned_ids)
        return {"batch": request.batch, "scoring": request.scoring}, {"request": request}

    def prepare_model_outputs(
        self, output: Any, output_args: dict, micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """Return log_probs (and entropy) as verl's jagged tensors: entry t is about token t + 1."""
        return output_args["request"].outputs(output)


def _refuse(model_config: Any, engine_config: Any) -> None:
    """Refuse what would not be mirrored; the preflight names keys, this is the last line."""
    found = []
    if model_config.lora_rank > 0 or model_config.lora_adapter_path:
        found.append("LoRA is not supported: the engine would run kernels outside the contract")
    if model_config.use_fused_kernels or model_config.use_liger:
        found.append("use_fused_kernels and use_liger replace our forward; turn them off")
    if engine_config.ulysses_sequence_parallel_size > 1:
        found.append("ulysses_sequence_parallel_size > 1 is not supported; use 1")
    if engine_config.pad_to_length:
        found.append("pad_to_length is not supported: padding is never computed; turn it off")
    if getattr(engine_config.qat, "enable", False):
        found.append("qat is not supported; turn it off")
    if model_config.tokenizer is None:
        found.append("the tokenizer is not loaded: its length bounds the vocabulary of the rollout")
    if found:
        raise ConfigurationError(found, "training engine")
