"""One expert block of Qwen3-MoE on engine ranks, trainer ranks, and one process.

`python expert_parallel_layers.py CHECKPOINT FOLDER` forks 2 engine ranks (vLLM's
Qwen3MoeSparseMoeBlock under the plugin, data parallel with experts spread over the ranks) and 4
trainer ranks (the bridged gate, experts through `ExpertParallelFunction`). Each rank takes its own
tokens and writes its rows to FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from consistent_kernels.testing import hazard_activations
from vllm_consistent import env, plugin

ENGINE_RANKS, TRAINER_RANKS, TOKENS, LAYER = 2, 4, 37, 0


def tokens() -> torch.Tensor:
    """What the block is given, [TOKENS, H]."""
    return hazard_activations((TOKENS, 192), seed=5)


def share(rank: int, world: int) -> slice:
    """Tokens of a rank: uneven, and none for the last of four."""
    cuts = [TOKENS * i * i // (world - 1) ** 2 for i in range(world)]
    return slice(cuts[rank], cuts[rank + 1]) if rank < world - 1 else slice(TOKENS, TOKENS)


def bridged_block(checkpoint: str) -> Any:
    """The trainer's block, fp32 masters."""
    from train_bridge import bridge_model

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return bridge_model(model).model.layers[LAYER].mlp


def engine_rank(rank: int, config: Any, weights: dict[str, torch.Tensor], folder: str) -> None:
    """Build the block as a worker does, load every expert, keep this rank's, run two steps."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    from vllm_consistent.layers.registry import register_layers

    torch.set_num_threads(1)
    config.parallel_config.data_parallel_rank = rank
    register_layers()
    with set_current_vllm_config(config), torch.device("cpu"):
        init_distributed_environment(1, 0, "env://", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        block = Qwen3MoeSparseMoeBlock(config, prefix=f"model.layers.{LAYER}.mlp")
        torch.set_default_dtype(torch.float32)
    experts = block.experts.routed_experts
    block.gate.weight.data.copy_(weights["gate.weight"])
    stacked = {name: tensor for name, tensor in weights.items() if name.startswith("experts.")}
    loaded = list(experts.load_weights((n.removeprefix("experts."), t) for n, t in stacked.items()))
    assert len(loaded) == 3 * experts.local_num_experts
    for module in (block.gate, experts):
        module.quant_method.process_weights_after_loading(module)
    mine = tokens()[share(rank, ENGINE_RANKS + 1)]
    with torch.no_grad():
        # Decode and prefill: a step of few rows here and many there, the same bits.
        first = block(mine[:1])
        rest = block(mine)
    assert torch.equal(first.view(torch.int16), rest[:1].view(torch.int16))
    found = {"y": rest, "held": experts.held, **updated(block, weights)}
    torch.save(found, Path(folder) / f"engine{rank}.pt")
    dist.barrier()


def updated(block: Any, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Push doubled weights of all experts into this rank, stacked and one by one; its receipts."""
    from vllm.config import get_current_vllm_config_or_none

    from consistent_kernels.contract import Contract
    from vllm_consistent.reporting import build_receipt
    from vllm_consistent.weights.names import HeldExperts, checkpoint_parts
    from vllm_consistent.weights.served import ServedWeights

    assert get_current_vllm_config_or_none() is None
    model = torch.nn.ModuleDict({"mlp": block})
    # vLLM's loader takes what is not shared by ranks, and single experts.
    model.load_weights = lambda pairs: [load(block, name, tensor) for name, tensor in pairs]
    served = ServedWeights(model, tied=False)
    contract = Contract("none", {}, {}, {}, {})
    stacked = {f"mlp.{name}": 2.0 * tensor for name, tensor in weights.items()}
    served.update(stacked.items(), 1, finish=True)
    receipts = [build_receipt(served, contract)]
    parts = checkpoint_parts(stacked, {})
    single = {name: part for of in parts.values() for name, part in of.items()}
    single["mlp.gate.weight"] = stacked["mlp.gate.weight"]
    served.update(single.items(), 1, finish=True)
    receipts.append(build_receipt(served, contract))
    assert set(served.held) == {f"mlp.experts.{name}_proj" for name in ("gate_up", "down")}
    assert all(isinstance(share, HeldExperts) for share in served.held.values())
    return {"receipts": receipts}


def load(block: Any, name: str, tensor: torch.Tensor) -> None:
    """As vLLM's model loader, for this block alone."""
    if name == "mlp.gate.weight":
        block.gate.weight.data.copy_(tensor)
        return
    assert list(
        block.experts.routed_experts.load_weights([(name.removeprefix("mlp.experts."), tensor)])
    )


def trainer_rank(rank: int, checkpoint: str, folder: str) -> None:
    """Run the bridged gate, and this rank's experts for the tokens of all ranks."""
    from consistent_kernels.expert_parallel import AllToAll, ExpertPlacement
    from consistent_kernels.experts import prepare_expert_weight
    from train_bridge.expert_parallel import ExpertParallel, ExpertParallelFunction

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), TRAINER_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=TRAINER_RANKS)
    block = bridged_block(checkpoint)
    masters = (block.experts.gate_up_proj, block.experts.down_proj)
    placement = ExpertPlacement(masters[0].shape[0], TRAINER_RANKS)
    parallel = ExpertParallel(AllToAll(), placement)
    impl = block.experts._bridge.impl("experts")
    local = [master.detach()[placement.experts(rank)].requires_grad_() for master in masters]
    prepared = tuple(prepare_expert_weight(w, dtype=torch.bfloat16, impl=impl) for w in local)
    x = tokens()[share(rank, TRAINER_RANKS)]
    _, weights, ids = block.gate(x)
    y = ExpertParallelFunction.apply(x, *local, ids, weights, None, prepared, parallel, None, impl)
    torch.save({"y": y.detach()}, Path(folder) / f"trainer{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(checkpoint: str, folder: str) -> None:
    """Fork all ranks: they share what was imported."""
    env.set_enabled(True)
    plugin.register()
    import vllm.model_executor.models.qwen3_moe  # noqa: F401 - imported once, before the forks
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.network_utils import get_open_ports_list

    torch.set_num_threads(1)
    config = EngineArgs(
        model=checkpoint,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=64,
        enable_expert_parallel=True,
        data_parallel_size=ENGINE_RANKS,
    ).create_engine_config()
    config.parallel_config._data_parallel_master_port_list = get_open_ports_list(5)
    block = bridged_block(checkpoint)
    weights = {name: p.detach().bfloat16() for name, p in block.named_parameters()}
    with torch.no_grad():
        torch.save(block(tokens()), Path(folder) / "alone.pt")
    context = mp.get_context("fork")
    ranks = [
        context.Process(target=engine_rank, args=(rank, config, weights, folder))
        for rank in range(ENGINE_RANKS)
    ] + [
        context.Process(target=trainer_rank, args=(rank, checkpoint, folder))
        for rank in range(TRAINER_RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    failed = [process.exitcode for process in ranks if process.exitcode]
    if failed:
        raise SystemExit(f"ranks failed: {failed}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
