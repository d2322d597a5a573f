"""verl's FSDP2 engine with our model and our log-probs.

What is verl's stays: loading, sharding, mixed precision, micro-batches, optimizer, checkpoints and
the loss. Ours are three places: the module (bridged before FSDP2 wraps it), the inputs and outputs
of its forward, and the weight stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from consistent_kernels.model_facts import model_facts
from consistent_kernels.resolve import resolve_contract
from train_bridge.hf import bridge_model
from train_bridge.verl.engine_mixin import ConsistentEngineMixin
from train_bridge.verl.scoring import score_request
from train_bridge.verl.weight_stream import weight_stream


class ConsistentFSDPEngineWithLMHead(ConsistentEngineMixin, FSDPEngineWithLMHead):
    """`FSDPEngineWithLMHead` whose log-probs are the rollout's, bit for bit.

    Registered for backend fsdp2 under the vendor "train_bridge" (see `registry.activate`).
    Micro-batches are always packed; `use_remove_padding` makes no difference to any bit.
    """

    @staticmethod
    def unsupported(model_config: Any, engine_config: Any) -> list[str]:
        """As the mixin's, and what FSDP2's configuration could ask for besides."""
        found = ConsistentEngineMixin.unsupported(model_config, engine_config)
        if model_config.use_liger:
            found.append("use_liger replaces our forward; turn it off")
        if engine_config.ulysses_sequence_parallel_size > 1:
            found.append("ulysses_sequence_parallel_size > 1 is not supported; use 1")
        return found

    def _build_module(self) -> torch.nn.Module:
        module, device = super()._build_module(), get_device_name()
        program = getattr(self.engine_config, "program", None)
        contract = None
        if program is not None:
            facts = model_facts(module.config, "bfloat16", architecture=type(module).__name__)
            contract = resolve_contract(facts, device, only=program)
        return bridge_model(module, contract, device_type=device)

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
