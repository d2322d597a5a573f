"""verl's actor with our engine beside a live vLLM engine, in one process; prints JSON.

python verl_session.py FAMILY FOLDER [STRATEGY]     (fsdp2, the default, or megatron)

Two training steps through verl's own calls (`compute_log_prob`, `update_actor`, its bucketed weight
transfer); log-probs are compared before, between and after them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl_cpu  # noqa: F401  registers the platform
from vllm_name import name_vllm
from word_tokenizer import TOKENIZER_LENGTH, write_tokenizer

TEMPERATURE, HOT = 0.7, 8.0
PROMPTS = [[5 + 11 * i + j for j in range(9 + 4 * i)] for i in range(4)]

RECIPES = {"fsdp2": "true_on_policy_grpo_fsdp", "megatron": "true_on_policy_grpo_megatron"}
MEGATRON = (
    # Set by verl's trainer, which is not here.
    "actor_rollout_ref.actor.optim.total_training_steps=10",
    # Without warm-up the first step moves weights.
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
)


def start_process_group(folder: Path, rank: int = 0, world: int = 1) -> None:
    """Join a gloo group, with the variables that verl's workers read."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        RAY_LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        VERL_PLATFORM="cpu",
    )
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)


def compose_recipe(model: Path, *overrides: str, strategy: str = "fsdp2") -> Any:
    """Return the shipped configuration, small."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("train_bridge.verl.config", version_base=None):
        return compose(
            RECIPES[strategy],
            overrides=[
                *(MEGATRON if strategy == "megatron" else ()),
                f"actor_rollout_ref.model.path={model}",
                f"data.train_batch_size={len(PROMPTS)}",
                "actor_rollout_ref.rollout.n=2",
                f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
                "actor_rollout_ref.actor.optim.lr=1e-3",
                "actor_rollout_ref.actor.entropy_coeff=0.001",
                "actor_rollout_ref.actor.use_kl_loss=false",
                *overrides,
            ],
        )


def start_actor(config: Any, actor_class: Any = None) -> Any:
    """Return verl's worker with the actor built."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    if config.actor_rollout_ref.actor.strategy == "megatron":
        import megatron_cpu

        megatron_cpu.install()
    worker = (actor_class or ActorRolloutRefWorker)(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def start_engine(model: Path, extension: str | None = None) -> Any:
    """Return a live engine as verl's server would start it: dummy weights, masked vocabulary."""
    from vllm_consistent.integrations.engine import ConsistentEngine

    engine = ConsistentEngine(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=128,
        worker_extension_cls=extension
        or "vllm_consistent.integrations.verl.ConsistentColocateWorkerExtension",
    )
    mask_vocabulary(engine)
    return engine


def mask_vocabulary(engine: Any) -> None:
    """Call what verl's server calls once after start-up."""
    engine.llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": TOKENIZER_LENGTH})


def update_weights(worker: Any, engine: Any) -> None:
    """Send the actor's weights as verl does, bucket by bucket through shared memory."""
    named, _ = worker.actor.engine.get_per_tensor_param()
    send(named, engine)


def send(named: Any, engine: Any) -> None:
    """Send named tensors; raise what the engine's worker raises."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    raised: list[BaseException] = []

    def receive() -> None:
        try:
            engine.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        except BaseException as error:
            raised.append(error)

    handle = "ipc:///tmp/rl-colocate-zmq-0-replica-0-rank-0.sock"
    sender = BucketedWeightSender(zmq_handle=handle, bucket_size_mb=2, use_shm=True)
    # A daemon: where sending fails, it waits for ever.
    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    asyncio.run(sender.async_send_weights(named))
    receiver.join()
    if raised:
        raise raised[0]
    engine.reset_prefix_cache()


def roll_out(engine: Any, step: int) -> list[Any]:
    """Sample two responses of each prompt, of different lengths."""
    from vllm import SamplingParams

    params = SamplingParams(
        n=2, temperature=TEMPERATURE, max_tokens=14 + step, seed=step, logprobs=0, detokenize=False
    )
    return engine.generate_with_logprobs(PROMPTS, params)


def verl_batch(samples: list[Any], **meta: Any) -> Any:
    """Return samples as verl's trainer hands them to its workers: jagged, unpadded."""
    from verl.utils import tensordict_utils as tu

    def jagged(rows: list[Any], dtype: torch.dtype) -> torch.Tensor:
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    whole = [(*s.prompt_ids, *s.token_ids) for s in samples]
    ones = [[1] * len(s.token_ids) for s in samples]
    advantages = [[0.5 - (i % 3)] * len(s.token_ids) for i, s in enumerate(samples)]
    tensors = {
        "input_ids": jagged(whole, torch.int64),
        "position_ids": jagged([range(len(row)) for row in whole], torch.int64),
        "prompts": jagged([s.prompt_ids for s in samples], torch.int64),
        "responses": jagged([s.token_ids for s in samples], torch.int64),
        "response_mask": jagged(ones, torch.int64),
        "loss_mask": jagged(ones, torch.int64),
        "rollout_log_probs": jagged([s.logprobs for s in samples], torch.float32),
        "advantages": jagged(advantages, torch.float32),
    }
    return tu.get_tensordict(tensors, {"temperature": TEMPERATURE, **meta})


def response_rows(worker: Any, samples: list[Any], **meta: Any) -> list[torch.Tensor]:
    """Score the samples with verl's call; one row of response log-probs each."""
    from verl.workers.utils.padding import response_from_nested

    batch = verl_batch(samples, calculate_entropy=True, compute_loss=False, **meta)
    output = worker.compute_log_prob(batch)
    return list(response_from_nested(output["log_probs"], batch["response_mask"]).unbind())


def train(
    worker: Any, samples: list[Any], old: list[torch.Tensor], total: int | None = None
) -> dict[str, Any]:
    """One optimizer step with verl's loss over `total` samples on all ranks; returns metrics."""
    total = total or len(samples)
    batch = verl_batch(
        samples,
        calculate_entropy=True,
        global_batch_size=total,
        mini_batch_size=total,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
    )
    batch["old_log_probs"] = torch.nested.as_nested_tensor(old, layout=torch.jagged)
    return worker.update_actor(batch)["metrics"]


def compare(samples: list[Any], rows: list[torch.Tensor]) -> dict[str, Any]:
    """Compare the rollout's log-probs with the trainer's."""
    from consistent_kernels.protocol import compare_logprobs

    report = compare_logprobs([s.logprobs for s in samples], [row.float() for row in rows])
    return {
        "tokens": report.num_tokens,
        "mismatched": report.mismatched_tokens,
        "first": str(report.first),
    }


def stock_rows(model: Path, bridged: Any, samples: list[Any]) -> list[torch.Tensor]:
    """Score with verl's own FSDP2 engine on the same weights."""
    from omegaconf import open_dict
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    EngineRegistry.register("language_model", "fsdp2", "cpu", "stock")(FSDPEngineWithLMHead)
    os.environ["VERL_ENGINE_VENDOR"] = "stock"
    target = "actor_rollout_ref.actor.fsdp_config._target_=verl.workers.config.FSDPEngineConfig"
    config = compose_recipe(model, target)
    with open_dict(config):
        for name in ("deterministic_gradients", "program"):
            config.actor_rollout_ref.actor.fsdp_config.pop(name)
    worker = start_actor(config)
    assert type(worker.actor.engine) is FSDPEngineWithLMHead
    theirs = dict(worker.actor.engine.module.named_parameters())
    with torch.no_grad():
        for name, parameter in bridged.actor.engine.module.named_parameters():
            theirs[name].to_local().copy_(parameter.to_local())
    return response_rows(worker, samples)


def one_bit_changed(named: Any) -> Any:
    """Yield the stream with the last bit of one norm weight flipped on its way."""
    for name, tensor in named:
        if name == "model.norm.weight":
            tensor = tensor.clone()
            tensor.view(torch.int16)[3] ^= 1
        yield name, tensor


def resume(
    worker: Any, engine: Any, folder: Path, samples: list[Any], old: list[torch.Tensor]
) -> dict[str, Any]:
    """Save, train on, load again with verl's checkpoints; then score, send and roll out."""
    checkpoint = str(folder / "checkpoint")
    worker.save_checkpoint(checkpoint, global_step=2)
    train(worker, samples, old)
    moved = compare(samples, response_rows(worker, samples))
    worker.load_checkpoint(checkpoint)
    restored = compare(samples, response_rows(worker, samples))
    update_weights(worker, engine)
    fresh = roll_out(engine, 5)
    return {
        "moved": moved,
        "restored": restored,
        "first_step": compare(fresh, response_rows(worker, fresh)),
    }


def stock_worker_start() -> None:
    """Be verl's start-up call on a worker that the plugin did not make."""
    from vllm_consistent.integrations.verl import ConsistentColocateWorkerExtension

    ConsistentColocateWorkerExtension.monkey_patch_model(object(), TOKENIZER_LENGTH)


def refusal_of(call: Any) -> str:
    """Return the error that `call()` raises, or "accepted"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def main(family: str, folder: Path, strategy: str = "fsdp2") -> dict[str, Any]:
    """Run the session; returns what the test asserts on."""
    from tiny_models import save_tiny_model

    torch.set_num_threads(1)
    sys.path.insert(0, str(name_vllm(folder / "names")))
    model = save_tiny_model(folder / "model", family)
    write_tokenizer(model)
    start_process_group(folder)
    worker = start_actor(compose_recipe(model, strategy=strategy))
    engine = start_engine(model)
    found: dict[str, Any] = {"engine": type(worker.actor.engine).__name__, "steps": []}
    found["no_plugin"] = refusal_of(stock_worker_start)
    found["dummy"] = refusal_of(lambda: roll_out(engine, 0))
    for step in range(3):
        update_weights(worker, engine)
        samples = roll_out(engine, step)
        old = response_rows(worker, samples)
        receipt = engine.weight_receipt()
        entry = compare(samples, old) | {
            "mean": float(torch.cat(old).mean()),
            "largest_id": max(max(s.token_ids) for s in samples),
            "version": receipt["version"],
            "total": receipt["total"],
        }
        if step < 2:
            entry["metrics"] = train(worker, samples, old)
        found["steps"].append(entry)
    found["resumed"] = resume(worker, engine, folder, samples, old)
    training = worker.actor.engine
    # Hot, so that ids beyond the tokenizer weigh in every sum of exponentials.
    masked = torch.cat(response_rows(worker, samples, temperature=HOT))
    training._valid_vocab = 1 << 30
    unmasked = torch.cat(response_rows(worker, samples, temperature=HOT))
    training._valid_vocab = TOKENIZER_LENGTH
    found["unmasked"] = {
        "tokens": masked.numel(),
        "mismatched": int((masked != unmasked).sum()),
    }
    if strategy == "fsdp2":  # verl's own Megatron engine needs Transformer Engine
        found["stock"] = compare(samples, stock_rows(model, worker, samples))
    named = list(training.get_per_tensor_param()[0])
    found["no_receipt"] = refusal_of(lambda: send(iter(named[:-1]), engine))
    found["after_refusal"] = refusal_of(lambda: roll_out(engine, 9))
    unknown = ("model.no_such.weight", torch.ones(2, dtype=torch.bfloat16))
    found["unknown"] = refusal_of(lambda: send(iter([unknown, *named]), engine))
    found["one_bit"] = refusal_of(lambda: send(one_bit_changed(named), engine))
    found["sent_again"] = refusal_of(lambda: send(iter(named), engine))
    return found


if __name__ == "__main__":
    sys.stdout.write(
        "\n" + json.dumps(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]), default=str) + "\n"
    )
