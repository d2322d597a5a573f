"""`python -m train_bridge.verl.main_ppo`: verl's main_ppo with our preflight, engine and trainer.

Every override of `verl.trainer.main_ppo` works. `--config-name` picks one of
`train_bridge/verl/config`, `--config-dir` adds a folder (see configs/recipes).
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from consistent_kernels.errors import ConfigurationError


@hydra.main(config_path="config", config_name="true_on_policy_grpo_fsdp", version_base=None)
def main(config: DictConfig) -> None:
    """Refuse what would break the equality, all reasons at once, with exit code 2; then train."""
    from train_bridge.verl.preflight import check

    try:
        check(config, to_run=True)
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None

    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from train_bridge.verl.task_runner import TrueOnPolicyTaskRunner

    auto_set_device(config)
    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    run_ppo(config, task_runner_class=TrueOnPolicyTaskRunner)


if __name__ == "__main__":
    main()
