"""verl's synchronous trainer, which stops where a rollout log-prob is not the trainer's own."""

from __future__ import annotations

import logging
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.engine_workers import ActorRolloutRefWorker

from consistent_kernels.contract import contract_from_dict, differences
from consistent_kernels.errors import ContractMismatchError, LogprobMismatchError
from consistent_kernels.protocol import compare_logprobs
from train_bridge.verl.comparison import (
    ABORT,
    FIELDS,
    PREFIX,
    MismatchPolicy,
    StepComparison,
    capture_of,
    compare_step,
    react,
)
from train_bridge.verl.preflight.view import View
from train_bridge.verl.workers import ConsistentActorRolloutRefWorker

logger = logging.getLogger("verl.true_on_policy")
# A child of verl's logger: libraries silence the root logger in verl's driver process.

MODE = "true_on_policy"
"""`trainer.v1.trainer_mode` that selects the trainer that stops at a mismatch."""

MEASURE = "measure_mismatch"
"""`trainer.v1.trainer_mode` that only measures."""

_SAMPLING = ("temperature", "top_p", "top_k", "seed", "response_length", "prompt_length", "dtype")


@register_trainer(MEASURE)
class MeasuringTrainer(PPOTrainerSync):
    """`PPOTrainerSync` that compares old and rollout log-probs bit for bit in each step.

    Adds `true_on_policy/*` to verl's metrics and changes nothing else: for stock engines.
    """

    @property
    def trainer_mode(self) -> str:
        """verl asks for "sync" in several places; this trainer is synchronous."""
        return "sync"

    @trainer_mode.setter
    def trainer_mode(self, value: str) -> None:
        pass

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS)
        )
        padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        comparison = compare_step(batch.keys, data, padding)
        metrics.update(comparison.metrics())
        if not comparison.report.bitwise_equal:
            self.on_mismatch(comparison)
        return batch

    def on_mismatch(self, comparison: StepComparison) -> None:
        """Called before the update of a step whose log-probs differ."""


@register_trainer(MODE)
class TrueOnPolicyTrainer(MeasuringTrainer):
    """`MeasuringTrainer` that acts on a mismatch, and verifies both sides before it starts.

    On a mismatch it writes a capture and stops before the update, or goes on with a warning
    (`true_on_policy.on_mismatch`).
    """

    def __init__(self, config: DictConfig) -> None:
        section = OmegaConf.to_container(config.get("true_on_policy") or {}, resolve=True)
        self.policy = MismatchPolicy(**section)
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, cls in self.role_worker_mapping.items():
            if cls.__ray_metadata__.modified_class.__name__ == ActorRolloutRefWorker.__name__:
                self.role_worker_mapping[role] = ray.remote(ConsistentActorRolloutRefWorker)

    def on_init_end(self) -> None:
        """Send the first weights, whose receipts the engines check, and compare the ranks."""
        super().on_init_end()
        contract = self._account()["report"]
        logger.warning("true on-policy: contract %s on every rank", contract["digest"])

    def _account(self) -> dict[str, Any]:
        """Return the first rank's account; raise ContractMismatchError where ranks differ."""
        accounts = self.actor_rollout_wg.consistency_account()
        first = accounts[0]
        ours = contract_from_dict(first["report"]["contract"])
        lines = [
            f"rank {rank}: {line}"
            for rank, other in enumerate(accounts[1:], start=1)
            for line in differences(ours, contract_from_dict(other["report"]["contract"]))
        ]
        lines += [
            f"rank {rank}: weights {other['receipt']['total'][:16]} != "
            f"{first['receipt']['total'][:16]}"
            for rank, other in enumerate(accounts[1:], start=1)
            if other["receipt"]["total"] != first["receipt"]["total"]
        ]
        expected = self.policy.contract_digest
        if expected and ours.digest != expected:
            lines.append(f"true_on_policy.contract_digest: {ours.digest} != {expected}")
        if lines:
            listed = "\n".join(f"  {line}" for line in lines)
            raise ContractMismatchError(f"training ranks do not run the same thing:\n{listed}")
        return first

    def on_mismatch(self, comparison: StepComparison) -> None:
        """Capture, then stop or warn."""
        account = self._account()
        rollout = self.config.actor_rollout_ref.rollout
        report = account["report"]
        capture = capture_of(
            comparison,
            self.global_steps,
            self.policy.capture_samples,
            sampling={name: rollout.get(name) for name in _SAMPLING},
            weights=account["receipt"],
            contract={"name": report["contract"]["name"], "digest": report["digest"]},
        )
        error = react(comparison, self.policy, capture)
        if self.policy.on_mismatch == ABORT:
            raise error
        logger.warning("%s", error)

    def _compute_ref_log_prob(self, batch: Any, metrics: dict) -> Any:
        batch = super()._compute_ref_log_prob(batch, metrics)
        if self.global_steps == 1:
            self._check_reference(batch, metrics)
        return batch

    def _check_reference(self, batch: Any, metrics: dict) -> None:
        """Before the first update policy and reference are one model: their KL is exactly 0."""
        fields = ["old_log_probs", "ref_log_prob", "response_mask"]
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        old, ref, mask = (list(data[name].unbind()) for name in fields)
        report = compare_logprobs(ref, old, mask)
        metrics[f"{PREFIX}ref_mismatched_tokens"] = report.mismatched_tokens
        if not report.bitwise_equal and self.policy.on_mismatch == ABORT:
            section = View(self.config).section
            raise LogprobMismatchError(
                f"step 1: reference and policy hold the same weights, but {report} differs. "
                f"Set actor_rollout_ref.ref.{section}._target_ as in actor.{section}"
            )
