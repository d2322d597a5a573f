"""verl's driver actor, which knows our trainer."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.main_ppo import TaskRunnerV1


@ray.remote
class TrueOnPolicyTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):
    """`TaskRunnerV1` in whose process our trainer is registered."""

    def run(self, config: Any) -> None:
        """Run verl's training loop."""
        import train_bridge.verl.trainer  # noqa: F401  registers itself with verl

        super().run(config)
