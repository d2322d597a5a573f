"""One of two ranks of verl's FSDP2 actor with our engine; leaves what it computed in a file.

python verl_rank.py RANK FOLDER
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
import verl_session

SAMPLES = [
    types.SimpleNamespace(
        prompt_ids=[7 + 5 * i + j for j in range(6 + 3 * i)],
        token_ids=[400 + 31 * i + 7 * j for j in range(5 + 2 * i)],
        logprobs=torch.zeros(5 + 2 * i),
    )
    for i in range(4)
]
"""Two for each rank, of different lengths: the ranks' micro-batches differ."""


def main(rank: int, folder: Path) -> None:
    """Score, make a step with deterministic gradients, score again, export."""
    torch.set_num_threads(1)
    verl_session.start_process_group(folder, rank, 2)
    config = verl_session.compose_recipe(
        folder / "model",
        "actor_rollout_ref.actor.fsdp_config.deterministic_gradients=true",
        "actor_rollout_ref.actor.fsdp_config.program=triton",
    )
    worker = verl_session.start_actor(config)
    mine = SAMPLES[rank::2]
    before = verl_session.response_rows(worker, mine)
    metrics = verl_session.train(worker, mine, before, total=len(SAMPLES))
    after = verl_session.response_rows(worker, mine)
    *weights, _ = worker.actor.engine.get_per_tensor_param()[0]
    torch.save(
        {
            "before": before,
            "after": after,
            "ppo_kl": [float(value) for value in metrics["actor/ppo_kl"]],
            "grad_norm": [float(value) for value in metrics["grad_norm"]],
            "sharded": any(p.to_local().numel() < p.numel() for p in parameters(worker)),
            "weights": dict(weights),
            "total": worker.actor.engine.handover().receipt.digest.total,
        },
        folder / f"rank{rank}.pt",
    )


def parameters(worker: object) -> list[torch.Tensor]:
    """Return the actor's sharded parameters."""
    return list(worker.actor.engine.module.parameters())


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
