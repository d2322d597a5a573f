"""verl's Megatron engine with our GPTModel and our log-probs.

What is verl's stays: process groups, DDP, optimizer, micro-batches, schedule, offloading, its
checkpoint manager and the loss. Ours are the module, the forward of a micro-batch, and the weights'
way in and out. With TP 1 and PP 1 every rank holds the whole model, so neither Megatron-Bridge nor
mbridge is needed to read a Hugging Face checkpoint, nor Transformer Engine to build a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.device import get_device_id, get_device_name
from verl.utils.megatron_utils import get_model, load_megatron_model_to_gpu
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from consistent_kernels.model_facts import model_facts
from consistent_kernels.resolve import resolve_contract
from train_bridge.hf import bridge_state
from train_bridge.megatron.checkpoint import load_hf_checkpoint, save_hf_checkpoint
from train_bridge.megatron.config import transformer_config
from train_bridge.megatron.model import bridge_gpt_model
from train_bridge.megatron.provider import get_gpt_block_vllm_spec
from train_bridge.modules import unwrapped
from train_bridge.verl.engine_mixin import ConsistentEngineMixin
from train_bridge.verl.scoring import score_request
from train_bridge.verl.weight_stream import weight_stream


class FolderBridge:
    """What verl's checkpoint manager calls of a bridge package, on plain .safetensors files."""

    def load_weights(self, models: Sequence[torch.nn.Module], weights_path: str) -> None:
        """Copy a Hugging Face checkpoint into the model."""
        load_hf_checkpoint(models[0], weights_path)

    def save_weights(self, models: Sequence[torch.nn.Module], weights_path: str) -> None:
        """Write the model as a Hugging Face checkpoint, on rank 0; every rank holds all of it."""
        if torch.distributed.get_rank() == 0:
            save_hf_checkpoint(models[0], weights_path)


class ConsistentMegatronEngineWithLMHead(ConsistentEngineMixin, MegatronEngineWithLMHead):
    """`MegatronEngineWithLMHead` whose log-probs are the rollout's, bit for bit.

    Registered for backend megatron under the vendor "train_bridge" (see `registry.activate`).
    Micro-batches are always packed, without alignment padding.
    """

    @staticmethod
    def unsupported(model_config: Any, engine_config: Any) -> list[str]:
        """As the mixin's, and what Megatron's configuration could ask for besides."""
        found = ConsistentEngineMixin.unsupported(model_config, engine_config)
        if model_config.lora and model_config.lora.get("rank", 0) > 0:
            found.append("LoRA is not supported: the engine would run kernels outside the contract")
        if model_config.mtp.enable:
            found.append("multi-token prediction is not supported; turn mtp.enable off")
        if engine_config.router_replay.mode != "disabled":
            found.append(
                "router_replay is not needed: both sides choose the same experts; disable it"
            )
        if engine_config.dynamic_context_parallel or engine_config.use_megatron_fsdp:
            found.append("dynamic_context_parallel and use_megatron_fsdp are not supported")
        if engine_config.override_mcore_model_config:
            found.append("override_mcore_model_config is not supported; leave it empty")
        for kind in ("tensor_model", "pipeline_model", "context", "expert_model"):
            size = getattr(engine_config, f"{kind}_parallel_size")
            if size != 1:
                found.append(f"{kind}_parallel_size={size} is not supported; use 1")
        if engine_config.virtual_pipeline_model_parallel_size not in (None, 1):
            found.append("virtual_pipeline_model_parallel_size is not supported; use null")
        return found

    def _build_tf_config(self) -> None:
        """Set what verl's would: configuration, dtype, bridge; out of config.json alone."""
        hf_config = self.model_config.hf_config
        self.is_value_model = False
        self.share_embeddings_and_output_weights = bool(hf_config.tie_word_embeddings)
        self.param_dtype = self.dtype = PrecisionType.to_dtype(self.engine_config.dtype)
        self._facts = model_facts(hf_config, "bfloat16")
        # A name of Transformer Engine's kernels; ours does not read it.
        options = dict(self.engine_config.override_transformer_config)
        options.pop("attention_backend", None)
        if options.get("recompute_granularity") != "selective":
            options.pop("recompute_modules", None)
        self.tf_config = transformer_config(
            self._facts,
            hf_config,
            bf16=True,
            use_cpu_initialization=get_device_name() == "cpu",
            **options,
        )
        self.provider = self.peft_cls = None
        self.vanilla_bridge = True
        self.bridge = FolderBridge()

    def _build_megatron_module(self) -> list[torch.nn.Module]:
        return get_model(
            self._bridged_model,
            wrap_with_ddp=not self.engine_config.forward_only,
            use_distributed_optimizer=self.engine_config.use_distributed_optimizer,
            transformer_config=self.tf_config,
            override_ddp_config=self._resolve_override_ddp_config(),
        )

    def _bridged_model(self, pre_process: bool, post_process: bool) -> torch.nn.Module:
        """Build, bridge and load the model: before DDP and the optimizer copy its parameters."""
        from megatron.core.models.gpt import GPTModel

        device, hf_config = get_device_name(), self.model_config.hf_config
        model = GPTModel(
            self.tf_config,
            get_gpt_block_vllm_spec(self.tf_config),
            vocab_size=self._facts.vocab_size,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            # Rotation is inside our op.
            position_embedding_type="none",
        )
        contract = resolve_contract(self._facts, device, only=self.engine_config.program)
        bridge_gpt_model(model, hf_config, contract=contract, device_type=device)
        load_hf_checkpoint(model, Path(self.model_config.local_path))
        return model

    def forward_step(
        self,
        batch_iter: Iterator[TensorDict],
        model: torch.nn.Module,
        logits_processor_func: Any,
        postprocess_micro_batch_func: Any,
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Score one micro-batch; megatron-core's schedule calls this."""
        micro_batch = next(batch_iter).to(get_device_id())
        inner = unwrapped(model)
        vocab = min(self._valid_vocab, self._facts.vocab_size)
        request = score_request(inner, micro_batch, vocab, self._banned_ids)
        columns = model(batch=request.batch, scoring=request.scoring)
        return request.outputs(columns), partial(postprocess_micro_batch_func, data=micro_batch)

    def get_per_tensor_param(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Yield Hugging Face names in bf16, with a receipt at the end (see `weight_stream`)."""
        load_megatron_model_to_gpu(self.module, load_grad=False)
        model = self.module[0]
        return weight_stream(model, unwrapped(model).hf_parameters(), served=self.served), None

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """As verl's; rounded copies of weights leave the device with the weights."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if model and device == "cpu":
            bridge_state(self.module[0]).prepared.clear()
