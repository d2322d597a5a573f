"""verl's worker extension with ours: verl's transport, our receipts.

Named by `actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls`.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from consistent_kernels.errors import (
    ConfigurationError,
    ContractMismatchError,
    StaleWeightsError,
)
from consistent_kernels.protocol.handover import Handover, split_handover
from consistent_kernels.protocol.report import ConsistencyReport, check_reports
from consistent_kernels.protocol.weights import WeightReceipt, check_receipt
from vllm_consistent.worker import ConsistencyWorkerExtension

_NO_RECORD = (
    "the trainer sent no receipt with its weights: its engine is not ours. Set "
    "actor_rollout_ref.actor.fsdp_config._target_="
    "train_bridge.verl.engine_config.ConsistentFSDPEngineConfig (strategy megatron: "
    "actor_rollout_ref.actor.megatron._target_=...ConsistentMcoreEngineConfig)"
)

_SWITCH = (
    "Install vllm-consistent on every node and set "
    "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_CONSISTENT=1"
)


class ConsistentColocateWorkerExtension(ConsistencyWorkerExtension, vLLMColocateWorkerExtension):
    """Serves verl's weights only after their receipt and both sides' reports agree.

    verl's server drops what a worker returns, so the comparison is made here, and a difference is
    an exception that stops the update. Until an update succeeds, rollouts are refused.
    """

    handover: Handover | None = None
    loading_error: str | None = None

    def monkey_patch_model(
        self, vocab_size: int, banned_token_ids: list[int] | None = None
    ) -> None:
        """As verl's, called once at start-up: ids that cannot be sampled get -inf logits.

        Raises:
            ConfigurationError: the plugin is not active in this worker.
            ContractMismatchError: something in it computes outside the contract.
        """
        if not hasattr(self, "served_weights"):
            raise ConfigurationError(
                [f"{type(self).__name__} is not the plugin's worker. {_SWITCH}"], "worker"
            )
        problems = ConsistencyReport.from_dict(self.consistency_report()).problems()
        if problems:
            raise ContractMismatchError(f"worker {self.rank}: {'; '.join(problems)}. {_SWITCH}")
        super().monkey_patch_model(vocab_size, banned_token_ids)
        if self.vllm_config.load_config.load_format == "dummy":
            self.served_weights.mark_stale(
                "the engine was started on dummy weights and the trainer has sent none yet"
            )

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """As verl's, then serve and compare.

        Raises:
            ConfigurationError: adapters instead of weights.
            StaleWeightsError: no record was sent, or versions, digests or contracts differ.
            ContractMismatchError: the two reports differ.
        """
        if peft_config:
            raise ConfigurationError(
                ["LoRA is not supported; set actor_rollout_ref.model.lora_rank=0"], "weight update"
            )
        self.handover = self.loading_error = None
        self.served_weights.mark_stale("a weight update is under way")
        super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
        try:
            if self.loading_error is not None:
                raise StaleWeightsError(f"the trainer's weights do not load: {self.loading_error}")
            self._agree(self.handover)
        except Exception as error:
            self.served_weights.mark_stale(f"the last weight update failed: {error}")
            raise

    def _update_weights(
        self, weights: list[tuple[str, torch.Tensor]], peft_config: Any, base_sync_done: bool
    ) -> None:
        # The sender waits for every bucket to be taken: an error must not leave it waiting.
        if self.loading_error is not None:
            return
        try:
            weights, record = split_handover(weights)
            self.handover = record or self.handover
            if weights:
                super()._update_weights(weights, peft_config, base_sync_done)
        except Exception as error:
            # As text: a traceback would keep the bucket's memory in use, and closing it would fail.
            self.loading_error = f"{type(error).__name__}: {error}"
        if self.loading_error is not None:
            gc.collect()

    def _agree(self, expected: Handover | None) -> None:
        if expected is None:
            raise StaleWeightsError(_NO_RECORD)
        receipt = self.serve_loaded_weights(expected.receipt.version)
        check_receipt(WeightReceipt.from_dict(receipt), expected.receipt)
        report = ConsistencyReport.from_dict(self.consistency_report())
        check_reports(expected.report, [report], served=expected.served)
