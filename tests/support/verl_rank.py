"""One of two ranks of verl's actor with our engine; leaves what it computed in a file.

python verl_rank.py RANK FOLDER STRATEGY     (fsdp2 or megatron)
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
import verl_session

from train_bridge.verl.preflight.view import SECTIONS

SAMPLES = [
    types.SimpleNamespace(
        prompt_ids=[7 + 5 * i + j for j in range(6 + 3 * i)],
        token_ids=[400 + 31 * i + 7 * j for j in range(5 + 2 * i)],
        logprobs=torch.zeros(5 + 2 * i),
    )
    for i in range(4)
]
"""Two for each rank, of different lengths: the ranks' micro-batches differ."""


def main(rank: int, folder: Path, strategy: str) -> None:
    """Score, make a step with deterministic gradients, score again, export, resume."""
    torch.set_num_threads(1)
    verl_session.start_process_group(folder, rank, 2)
    config = verl_session.compose_recipe(
        folder / "model",
        f"actor_rollout_ref.actor.{SECTIONS[strategy]}.deterministic_gradients=true",
        f"actor_rollout_ref.actor.{SECTIONS[strategy]}.program=triton",
        strategy=strategy,
    )
    worker = verl_session.start_actor(config)
    mine = SAMPLES[rank::2]
    before = verl_session.response_rows(worker, mine)
    metrics = verl_session.train(worker, mine, before, total=len(SAMPLES))
    after = verl_session.response_rows(worker, mine)
    worker.save_checkpoint(str(folder / "checkpoint"), global_step=1)
    *weights, _ = worker.actor.engine.get_per_tensor_param()[0]
    total = worker.actor.engine.handover().receipt.digest.total
    verl_session.train(worker, mine, after, total=len(SAMPLES))
    moved = verl_session.response_rows(worker, mine)
    worker.load_checkpoint(str(folder / "checkpoint"))
    torch.save(
        {
            "engine": type(worker.actor.engine).__name__,
            "moved": moved,
            "resumed": verl_session.response_rows(worker, mine),
            "before": before,
            "after": after,
            "ppo_kl": [float(value) for value in metrics["actor/ppo_kl"]],
            "grad_norm": [float(value) for value in metrics["grad_norm"]],
            "shard": shard_of(worker.actor.engine, strategy),
            "weights": dict(weights),
            "total": total,
        },
        folder / f"rank{rank}.pt",
    )


def shard_of(engine: object, strategy: str) -> float:
    """Return which part of the masters this rank holds."""
    if strategy == "megatron":
        groups = engine.optimizer.param_groups
        mine = sum(p.numel() for group in groups for p in group["params"])
        return mine / sum(p.numel() for p in engine.module[0].parameters())
    parameters = list(engine.module.parameters())
    return sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
