"""What our engines for FSDP2 and Megatron do alike: refuse, hand over, mark what has served."""

from __future__ import annotations

import contextlib
from typing import Any

from verl.utils.device import get_device_name
from verl.workers.rollout.utils import get_vision_placeholder_token_ids

from consistent_kernels.errors import ConfigurationError
from consistent_kernels.protocol.handover import Handover
from train_bridge.determinism import deterministic_gradients


class ConsistentEngineMixin:
    """Stands before verl's engine among the bases.

    Attributes:
        served: whether a forward has run, so that a report must show calls of every op.
    """

    served: bool

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        found = self.unsupported(model_config, engine_config)
        if found:
            raise ConfigurationError(found, "training engine")
        self.served = False
        super().__init__(model_config, engine_config, *args, **kwargs)
        self._valid_vocab = len(model_config.tokenizer)
        self._banned_ids = get_vision_placeholder_token_ids(model_config.processor) or None

    @staticmethod
    def unsupported(model_config: Any, engine_config: Any) -> list[str]:
        """Return what would not be mirrored; the preflight names keys, this is the last line."""
        found = []
        if model_config.lora_rank > 0 or model_config.lora_adapter_path:
            found.append("LoRA is not supported: the engine would run kernels outside the contract")
        if model_config.use_fused_kernels:
            found.append("use_fused_kernels replaces our forward; turn it off")
        if engine_config.pad_to_length:
            found.append("pad_to_length is not supported: padding is never computed; turn it off")
        if getattr(engine_config.qat, "enable", False):
            found.append("qat is not supported; turn it off")
        if model_config.tokenizer is None:
            found.append("the tokenizer is not loaded: its length bounds the rollout's vocabulary")
        return found

    def handover(self) -> Handover:
        """Return this rank's receipt and report; all ranks must take part."""
        *_, (_, record) = self.get_per_tensor_param()[0]
        return Handover.from_tensor(record)

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's; a training step with deterministic gradients where they are asked for."""
        training = not (kwargs.get("forward_only") or (len(args) > 2 and args[2]))
        wanted = getattr(self.engine_config, "deterministic_gradients", False) and training
        switch = deterministic_gradients(get_device_name()) if wanted else contextlib.nullcontext()
        with switch:
            output = super().forward_backward_batch(*args, **kwargs)
        self.served = True
        return output
