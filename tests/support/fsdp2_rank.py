"""What a rank of the FSDP2 tests does; run as a script, it is one of two ranks.

python fsdp2_rank.py RANK FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from consistent_kernels.protocol.weights import state_digest
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge import bridge_model, token_logprobs
from train_bridge.weights import exported_weights

TEMPERATURE = torch.tensor([0.7, 1.3])  # neither is a bf16 value
IDS = torch.arange(5, 45).view(2, 20)


def shard(model: torch.nn.Module, *, mixed: bool) -> torch.nn.Module:
    """Wrap as verl does: decoder layers by class name, an untied embedding and head, the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=True,
    )
    names = set(model._no_split_modules)
    tied = model.config.tie_word_embeddings
    wrapped = [
        module
        for module in model.modules()
        if type(module).__name__ in names
        or (not tied and module in (model.get_input_embeddings(), model.get_output_embeddings()))
    ]
    for module in wrapped:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert len(wrapped) == model.config.num_hidden_layers + (0 if tied else 2)
    return model


def two_steps(model: torch.nn.Module, ids: torch.Tensor, heat: torch.Tensor) -> list[torch.Tensor]:
    """Log-probs before, between and after two optimizer steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    for _ in range(2):
        with torch.no_grad():
            scored = token_logprobs(model, ids, temperature=heat, micro_batch_size=1)
        trained = token_logprobs(model, ids, temperature=heat)
        assert_bitwise_equal(trained.log_probs.detach(), scored.log_probs)
        seen.append(scored.log_probs)
        trained.log_probs.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen.append(token_logprobs(model, ids, temperature=heat).log_probs)
    return seen


def main(rank: int, folder: Path) -> None:
    """Train on one of the two sequences; leave the first scores and the final digest."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2
    )
    model = shard(bridge_model(tiny_model("qwen3", dtype=torch.float32)), mixed=True).train()
    seen = two_steps(model, IDS[rank : rank + 1], TEMPERATURE[rank : rank + 1])
    digest = state_digest(exported_weights(model)).total
    torch.save({"log_probs": seen[0], "digest": digest}, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
