"""verl's own main_ppo and trainer, with our comparison as a measurement: the stock side.

`python measured.py` takes the arguments of `verl.trainer.main_ppo`. Engine, plugin and forward are
verl's and vLLM's; only `true_on_policy/*` is added to the metrics, and nothing is refused.
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Train with verl's synchronous trainer and measure."""
    from verl.trainer.main_ppo import run_ppo

    from train_bridge.verl.task_runner import TrueOnPolicyTaskRunner

    run_ppo(config, task_runner_class=TrueOnPolicyTaskRunner)


if __name__ == "__main__":
    main()
