"""One rank of an engine whose experts are spread over two: rollouts, an update, a trainer's scores.

`python expert_parallel_engine.py CHECKPOINT FOLDER RANK PORT`; all ranks run at once, each with its
own requests, and each compares its own samples with a trainer that holds every expert.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

RANKS = 2


def rollouts(engine: Any, trainer: Any, rank: int, seed: int) -> dict[str, Any]:
    """Sample, score again by engine and trainer; rank 1 has more requests and longer ones."""
    from parity import prompts, rescored, sampled_scores, trainer_scores
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=6 + 3 * rank, ignore_eos=True, seed=seed, logprobs=0, detokenize=False
    )
    lengths = (1, 17, 129)[: 2 + rank]
    samples = engine.generate_with_logprobs(prompts(seed + rank, lengths), params)
    sampled = sampled_scores(samples)
    with torch.no_grad():
        trained = trainer_scores(trainer, samples)
    again = rescored(engine, samples, 1.0)
    return {
        "tokens": sampled.numel(),
        "mean": float(sampled.mean()),
        "trainer": int((trained.view(torch.int32) != sampled.view(torch.int32)).sum()),
        "rescored": int((again.view(torch.int32) != sampled.view(torch.int32)).sum()),
    }


def main(checkpoint: str, folder: str, rank: int, port: int) -> None:
    """Run one rank and write what it found to FOLDER."""
    os.environ.update(
        VLLM_DP_RANK=str(rank),
        VLLM_DP_RANK_LOCAL=str(rank),
        VLLM_DP_SIZE=str(RANKS),
        VLLM_DP_MASTER_IP="127.0.0.1",
        VLLM_DP_MASTER_PORT=str(port),
        # Ranks share the machine's cores: no thread of one waits on a core of the other.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    from transformers import AutoModelForCausalLM

    from consistent_kernels.errors import StaleWeightsError
    from train_bridge import bridge_model, push_weights, weight_version
    from vllm_consistent.integrations.engine import ConsistentEngine

    torch.set_num_threads(1)
    engine = ConsistentEngine(
        checkpoint,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 26,
        enable_expert_parallel=True,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    trainer = bridge_model(model, engine.contract)
    found = {"start": rollouts(engine, trainer, rank, 1)}
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.01)
    weight_version(trainer).bump()
    files = Path(folder) / f"weights{rank}"
    receipt = push_weights(trainer, engine.llm, path=files)
    held = engine.weight_receipt()["rows"]
    found["update"] = rollouts(engine, trainer, rank, 2)
    found["version"] = receipt.version
    found["held"] = sorted({tuple(rows) for rows in held.values()})
    # A change that was not pushed shows.
    name = "model.layers.0.mlp.experts.down_proj"
    with torch.no_grad():
        trainer.get_parameter(name).mul_(1.5)
    weight_version(trainer).bump()
    found["control"] = rollouts(engine, trainer, rank, 3)
    try:
        engine.update_weights(path=str(_without(files, name)))
    except (StaleWeightsError, RuntimeError) as error:
        found["lost"] = str(error)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    # A data parallel rank in this process was seen to hang in vLLM's shutdown; its worker ends with
    # the process.
    os._exit(0)


def _without(files: Path, name: str) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(files / "weights.safetensors")
    del tensors[name]
    target = files / "lost.safetensors"
    save_file(tensors, target)
    return target


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
