"""Experts on 1, 2, 4 and 8 ranks in one go: `python expert_parallel_ranks.py FOLDER DEVICE WORLD`.

Forks WORLD processes (spawns them on CUDA). Groups of consecutive ranks share the experts; every
group serves the same tokens, cut unevenly among its ranks, the last of which has none. Each rank
writes what it computed to FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from expert_cases import Shape, masters, routing, tokens

from consistent_kernels.expert_parallel import (
    AllToAll,
    ExpertPlacement,
    Travelled,
    expert_parallel_experts,
    over_ranks,
)
from consistent_kernels.experts import combine, experts, prepare_expert_weight
from consistent_kernels.fp8_experts import (
    Fp8ExpertWeight,
    fp8_expert_outputs,
    fp8_experts,
    quantize_expert_weight,
)
from consistent_kernels.testing import hazard_activations
from train_bridge.expert_parallel import (
    ExpertParallel,
    ExpertParallelFunction,
    Fp8ExpertParallelFunction,
)
from train_bridge.functions.fp8_experts import Fp8ExpertsFunction

SHAPE = Shape(11, 3, 72, 40)
"""Experts that divide by no number of ranks."""
FP8_SHAPE = Shape(11, 3, 160, 128)
TOKENS = 37
LIMIT = 0.5


def whole(device: str) -> dict[str, torch.Tensor]:
    """All tokens, routed; the gradient of their result."""
    ids, weights = routing(SHAPE, TOKENS, device, seed=2)
    return {
        "x": tokens(SHAPE, TOKENS, device, seed=1),
        "ids": ids,
        "weights": weights,
        "shared": hazard_activations((TOKENS, SHAPE.hidden), seed=3, device=device),
        "grad": hazard_activations((TOKENS, SHAPE.hidden), seed=4, device=device),
    }


def impl_of(device: str) -> str:
    """The implementation to run there."""
    return "triton" if device == "cuda" else "reference"


CROWDED = 4
"""An expert that is in the middle of a rank's, or alone on one."""


def crowded(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tokens, all of them sent to one expert: the other ranks compute nothing."""
    one = {name: given[name][:, :1].contiguous() for name in ("ids", "weights")}
    return given | one | {"ids": torch.full_like(one["ids"], CROWDED)}


def on_one_rank(device: str, *, one_expert: bool = False) -> torch.Tensor:
    """The layer with all experts in one process, and no exchange."""
    given = crowded(whole(device)) if one_expert else whole(device)
    w13, w2 = (
        prepare_expert_weight(w, dtype=torch.bfloat16, impl=impl_of(device))
        for w in masters(SHAPE, device)
    )
    return experts(
        given["x"],
        w13,
        w2,
        given["ids"],
        given["weights"],
        given["shared"],
        limit=LIMIT,
        impl=impl_of(device),
    )


def fp8_of(
    experts_of_rank: slice, device: str
) -> tuple[tuple[Fp8ExpertWeight, Fp8ExpertWeight], dict[str, torch.Tensor]]:
    """Block-FP8 experts of a rank, and all tokens, routed."""
    ids, weights = routing(FP8_SHAPE, TOKENS, device, seed=6)
    w13, w2 = (
        quantize_expert_weight(
            w[experts_of_rank].contiguous(), scale_format="fp32", impl=impl_of(device)
        )
        for w in masters(FP8_SHAPE, device)
    )
    x = tokens(FP8_SHAPE, TOKENS, device, seed=5)
    return (w13, w2), {"x": x, "ids": ids, "weights": weights}


def fp8_on_one_rank(device: str) -> torch.Tensor:
    """The block-FP8 layer with all experts in one process, and no exchange."""
    stacked, given = fp8_of(slice(None), device)
    routed = (given["ids"], given["weights"])
    return fp8_experts(given["x"], *stacked, *routed, scale_format="fp32", impl=impl_of(device))


def fp8_over_ranks(exchange: AllToAll, part: slice, device: str) -> torch.Tensor:
    """This rank's tokens of the block-FP8 layer, as an engine's layer computes them."""
    placement = ExpertPlacement(FP8_SHAPE.experts, exchange.world_size)
    stacked, given = fp8_of(placement.experts(exchange.rank), device)
    x, ids, weights = (given[name][part].contiguous() for name in ("x", "ids", "weights"))
    impl = impl_of(device)

    def outputs(rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        options = {"scale_format": "fp32", "layout": "fastest", "impl": impl}
        return fp8_expert_outputs(rows, *stacked, local, **options)

    y = over_ranks(x, ids, outputs, exchange=exchange, placement=placement)
    return combine(y, ids, weights, impl=impl)


def fp8_trained(
    x: torch.Tensor, routed: tuple[torch.Tensor, torch.Tensor], apply: Callable, local: slice,
    device: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """Forward and backward of some tokens through `apply(x, masters, routed, quantized)`."""
    stacked, _ = fp8_of(local, device)
    own = [w[local].contiguous().requires_grad_() for w in masters(FP8_SHAPE, device)]
    ids, weights = routed
    leaves = [x.clone().requires_grad_(), *own, weights.clone().requires_grad_()]
    out = apply(*leaves[:3], ids, leaves[3], None, stacked)
    # A gradient that every rank can form for its own tokens.
    out.backward((x.float() * 0.25).to(x.dtype))
    return out.detach(), [leaf.grad for leaf in leaves]


def fp8_trained_on_one_rank(device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The block-FP8 layer of a trainer with all experts in one process."""
    _, given = fp8_of(slice(None), device)

    def apply(*arguments: Any) -> torch.Tensor:
        return Fp8ExpertsFunction.apply(*arguments, "fp32", LIMIT, impl_of(device))

    routed = (given["ids"], given["weights"])
    return fp8_trained(given["x"], routed, apply, slice(None), device)


def fp8_trained_over_ranks(
    exchange: AllToAll, part: slice, device: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """This rank's tokens and experts of the same layer."""
    placement = ExpertPlacement(FP8_SHAPE.experts, exchange.world_size)
    _, given = fp8_of(slice(None), device)
    x, ids, weights = (given[name][part].contiguous() for name in ("x", "ids", "weights"))

    def apply(*arguments: Any) -> torch.Tensor:
        parallel = ExpertParallel(exchange, placement)
        return Fp8ExpertParallelFunction.apply(*arguments, "fp32", parallel, LIMIT, impl_of(device))

    return fp8_trained(x, (ids, weights), apply, placement.experts(exchange.rank), device)


class Shuffled(AllToAll):
    """An exchange whose rows arrive in another order every time."""

    calls = 0

    def deliver(self, rows: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
        """As AllToAll, shuffled."""
        received = super().deliver(rows, destination)
        self.calls += 1
        generator = torch.Generator().manual_seed(1000 * self.rank + self.calls)
        order = torch.randperm(received.shape[0], generator=generator)
        return received[order.to(received.device)]


def share_of(rank: int, world: int) -> slice:
    """Tokens of a rank: uneven, and none for the last of several."""
    if world == 1:
        return slice(0, TOKENS)
    cuts = [TOKENS * i * i // (world - 1) ** 2 for i in range(world)]
    return slice(cuts[rank], cuts[rank + 1]) if rank < world - 1 else slice(TOKENS, TOKENS)


def run_group(group: Any, device: str) -> dict[str, Any]:
    """What one rank of one group computes."""
    exchange, impl = AllToAll(group), impl_of(device)
    placement = ExpertPlacement(SHAPE.experts, exchange.world_size)
    mine = placement.experts(exchange.rank)
    local = [w[mine].contiguous().requires_grad_() for w in masters(SHAPE, device)]
    prepared = tuple(prepare_expert_weight(w, dtype=torch.bfloat16, impl=impl) for w in local)
    part = share_of(exchange.rank, exchange.world_size)
    given = {name: value[part].contiguous() for name, value in whole(device).items()}
    forward = (given["x"], *prepared, given["ids"], given["weights"], given["shared"])
    kept = {
        layout: expert_parallel_experts(
            *forward, exchange=exchange, placement=placement, limit=LIMIT, layout=layout, impl=impl
        )
        for layout in ("contiguous", "masked")
    }
    kept["shuffled"] = expert_parallel_experts(
        *forward, exchange=Shuffled(group), placement=placement, limit=LIMIT, impl=impl
    )
    names = ("x", "ids", "weights", "shared")
    for name, some in (
        ("one expert", crowded(given)),
        ("no tokens", {name: given[name][:0] for name in names}),
    ):
        x, *routed = (some[key] for key in names)
        kept[name] = expert_parallel_experts(
            x, *prepared, *routed, exchange=exchange, placement=placement, limit=LIMIT, impl=impl
        )
    kept["fp8"] = fp8_over_ranks(exchange, part, device)
    kept["fp8 shuffled"] = fp8_over_ranks(Shuffled(group), part, device)
    kept["fp8 trained"], kept["fp8 grads"] = fp8_trained_over_ranks(Shuffled(group), part, device)
    leaves = [given[name].requires_grad_() for name in ("x", "weights", "shared")]
    parallel = ExpertParallel(Shuffled(group), placement)
    trained = ExpertParallelFunction.apply(
        leaves[0], *local, given["ids"], *leaves[1:], prepared, parallel, LIMIT, impl
    )
    trained.backward(given["grad"])
    kept["trained"] = trained.detach()
    kept["part"], kept["experts"] = part, mine
    kept["grads"] = [leaf.grad for leaf in (*leaves, *local)]
    return kept


def rank_main(rank: int, folder: str, device: str, world: int) -> None:
    """One process: every size of group that divides the world."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    results = {}
    size = 1
    while size <= world:
        groups = [
            dist.new_group(list(range(first, first + size))) for first in range(0, world, size)
        ]
        results[size] = run_group(groups[rank // size], device)
        size *= 2
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def lost_row(rank: int = 0) -> None:
    """An exchange that drops a row is noticed (called by a test in its own process)."""
    from consistent_kernels.expert_parallel import dispatch, give_back

    class Alone:
        world_size = 1

        def __init__(self) -> None:
            self.rank = rank

        def deliver(self, rows: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
            return rows[: len(destination)]

    exchange, given = Alone(), whole("cpu")
    placement = ExpertPlacement(SHAPE.experts, 1)
    arrived = dispatch(given["x"], given["ids"], exchange, placement)
    give_back(Travelled(arrived.values[1:], arrived.fields[1:]), exchange, given["ids"])


if __name__ == "__main__":
    target, kind, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # A fork shares what was imported: eight interpreters would import for a minute.
    method = "spawn" if kind == "cuda" else "fork"
    mp.start_processes(rank_main, args=(target, kind, count), nprocs=count, start_method=method)
