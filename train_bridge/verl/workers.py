"""verl's worker with one more call: what its actor says of itself."""

from __future__ import annotations

from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from consistent_kernels.errors import ConfigurationError
from train_bridge.verl.preflight.relations import ENGINE_CONFIGS
from train_bridge.verl.preflight.view import SECTIONS


class ConsistentActorRolloutRefWorker(ActorRolloutRefWorker):
    """`ActorRolloutRefWorker` that can be asked for its account."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def consistency_account(self) -> dict[str, Any]:
        """Return {"receipt": ..., "report": ...} of this rank's actor, as plain types.

        Raises:
            ConfigurationError: the actor's, or the reference's, engine is not ours.
        """
        for key, part in (("actor", self.actor), ("ref", self.ref)):
            if part is not None and not hasattr(part.engine, "handover"):
                strategy = part.engine_config.strategy
                section, wanted = SECTIONS.get(strategy), ENGINE_CONFIGS.get(strategy)
                raise ConfigurationError(
                    [
                        f"actor_rollout_ref.{key}.{section}._target_: the engine is "
                        f"{type(part.engine).__name__}, not ours; set it to {wanted} and leave "
                        "VERL_ENGINE_VENDOR unset"
                    ],
                    "training engine",
                )
        record = self.actor.engine.handover()
        return {"receipt": record.receipt.to_dict(), "report": record.report.to_dict()}
