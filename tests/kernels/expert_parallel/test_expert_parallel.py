"""Experts over 1, 2, 4 and 8 ranks have the bits of one process, whatever the order of arrival."""

from __future__ import annotations

from typing import Any

import expert_parallel_ranks as ranks
import pytest
import torch
from child_process import run_python
from expert_cases import Shape, masters, routing

from consistent_kernels.errors import ConsistencyError, InvalidInputError, UnsupportedError
from consistent_kernels.expert_parallel import (
    ExpertPlacement,
    dispatch,
    dispatch_slots,
    expert_parallel_outputs,
    give_back,
    over_ranks,
)
from consistent_kernels.expert_parallel.deep_ep import DeepEP
from consistent_kernels.experts import experts_bwd, prepare_expert_weight
from consistent_kernels.fp8_experts import fp8_expert_outputs, quantize_expert_weight
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal, hazard_activations
from train_bridge.expert_parallel import (
    ExpertParallel,
    ExpertParallelFunction,
    Fp8ExpertParallelFunction,
)

CPU = pytest.param(("cpu", 8), id="gloo-8")
CUDA = pytest.param(
    ("cuda", 2),
    id="nccl-2",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            torch.cuda.device_count() < 2, reason="NCCL between ranks needs two CUDA devices"
        ),
    ],
)


@pytest.fixture(scope="module", params=[CPU, CUDA])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[int, list[dict[str, Any]]]]:
    """(device, {ranks of a group: what each rank of all such groups computed})."""
    device, world = request.param
    folder = tmp_path_factory.mktemp(device)
    done = run_python(ranks.__file__, folder, device, str(world), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    kept = [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(world)]
    return device, {size: [rank[size] for rank in kept] for size in kept[0]}


def gathered(results: list[dict[str, Any]], size: int, name: str) -> list[torch.Tensor]:
    """The rows of all ranks of each group, one tensor a group."""
    groups = [results[i : i + size] for i in range(0, len(results), size)]
    return [torch.cat([rank[name].cpu() for rank in group]) for group in groups]


@pytest.mark.parametrize("name", ["contiguous", "masked", "shuffled"])
def test_expert_parallel_equals_one_rank(run: tuple[str, dict], name: str) -> None:
    device, by_size = run
    expected = ranks.on_one_rank(device).cpu()
    assert set(by_size) == ({1, 2, 4, 8} if device == "cpu" else {1, 2})
    for size, results in by_size.items():
        for out in gathered(results, size, name):
            assert_bitwise_equal(out, expected, f"{size} ranks, {name}")


def test_expert_parallel_of_one_expert_and_of_no_tokens(run: tuple[str, dict]) -> None:
    device, by_size = run
    expected = ranks.on_one_rank(device, one_expert=True).cpu()
    assert not bitwise_equal(expected, ranks.on_one_rank(device).cpu())
    for size, results in by_size.items():
        for out in gathered(results, size, "one expert"):
            assert_bitwise_equal(out, expected, f"{size} ranks")
        for out in gathered(results, size, "no tokens"):
            assert out.shape == (0, ranks.SHAPE.hidden)


@pytest.mark.parametrize("name", ["fp8", "fp8 shuffled"])
def test_fp8_expert_parallel_equals_one_rank(run: tuple[str, dict], name: str) -> None:
    device, by_size = run
    expected = ranks.fp8_on_one_rank(device).cpu()
    for size, results in by_size.items():
        for out in gathered(results, size, name):
            assert_bitwise_equal(out, expected, f"{size} ranks, {name}")


def test_expert_parallel_train_equals_infer_across_sizes(run: tuple[str, dict]) -> None:
    # The trainer's forward on any number of ranks has the bits of an engine's on any other.
    _, by_size = run
    engine_size = 2
    engine = gathered(by_size[engine_size], engine_size, "contiguous")[0]
    for size, results in by_size.items():
        for out in gathered(results, size, "trained"):
            assert_bitwise_equal(out, engine, f"trainer on {size} ranks, engine on {engine_size}")


def test_expert_parallel_grad_matches_one_process(run: tuple[str, dict]) -> None:
    device, by_size = run
    given, impl = ranks.whole("cpu"), "reference"
    w13, w2 = (
        prepare_expert_weight(w, dtype=torch.bfloat16, impl=impl)
        for w in ranks.masters(ranks.SHAPE, "cpu")
    )
    grad_x, grad_w13, grad_w2, grad_weights = experts_bwd(
        given["grad"],
        given["x"],
        w13,
        w2,
        given["ids"],
        given["weights"],
        limit=ranks.LIMIT,
        impl=impl,
    )
    routed = given["ids"] >= 0
    expected = (grad_x, torch.where(routed, grad_weights, 0.0), given["grad"], grad_w13, grad_w2)
    for size, results in by_size.items():
        for first in range(0, len(results), size):
            group = results[first : first + size]
            for index, reference in enumerate(expected):
                actual = torch.cat([rank["grads"][index].cpu() for rank in group])
                # Both round the same intermediates; what is left is the order of fp32 sums and,
                # on another device, bf16 values on the other side of a tie.
                error = float((actual.float() - reference.float()).norm())
                least = 2**-7 if device == "cuda" else 2**-9
                assert error <= least * float(reference.float().norm()), (size, index)


def test_fp8_expert_parallel_train_equals_one_rank(run: tuple[str, dict]) -> None:
    """Forward bit for bit; gradients as those of one process, but for the order of fp32 sums."""
    device, by_size = run
    expected, grads = ranks.fp8_trained_on_one_rank(device)
    for size, results in by_size.items():
        for out in gathered(results, size, "fp8 trained"):
            assert_bitwise_equal(out, expected.cpu(), f"{size} ranks")
        for first in range(0, len(results), size):
            group = results[first : first + size]
            for index, reference in enumerate(grads):
                actual = torch.cat([rank["fp8 grads"][index].cpu() for rank in group])
                assert actual.dtype == reference.dtype
                error = float((actual.float() - reference.cpu().float()).norm())
                assert error <= 2**-9 * float(reference.float().norm()), (size, index)


def test_control_summing_at_the_experts_rank_differs() -> None:
    # What a combine that adds partial sums by rank does: the bits follow the number of ranks.
    y = torch.randn((200, 8, 64), generator=torch.Generator().manual_seed(1)).bfloat16().float()
    weights = torch.rand((200, 8, 1), generator=torch.Generator().manual_seed(2))
    terms = weights * y

    def in_slots(values: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(values[:, 0])
        for slot in range(values.shape[1]):
            total += values[:, slot]
        return total

    two = in_slots(terms[:, ::2]).bfloat16() + in_slots(terms[:, 1::2]).bfloat16()
    assert not bitwise_equal(two, in_slots(terms).bfloat16())


def test_expert_parallel_notices_a_lost_row() -> None:
    with pytest.raises(ConsistencyError, match="some lost or twice; the exchange is broken"):
        ranks.lost_row()


def test_placement_names_a_rank_that_is_none() -> None:
    for rank in (-1, 3):
        with pytest.raises(InvalidInputError, match=f"rank must be from 0 to 1, got {rank}"):
            ExpertPlacement(8, 2).experts(rank)


def test_placement_covers_every_expert_once() -> None:
    for experts, world in ((8, 8), (11, 4), (256, 8), (5, 3)):
        placement = ExpertPlacement(experts, world)
        owners = placement.owners(torch.arange(experts)).tolist()
        for rank in range(world):
            mine = placement.experts(rank)
            assert owners[mine] == [rank] * (mine.stop - mine.start)
        assert sorted(owners) == owners
        assert max(map(owners.count, owners)) - min(map(owners.count, owners)) <= 1


class Alone:
    """One rank: rows stay."""

    rank, world_size = 0, 1

    def deliver(self, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return rows


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_fp8_expert_parallel_of_one_rank_equals_no_exchange(device: str) -> None:
    expected, grads = ranks.fp8_trained_on_one_rank(device)
    actual, ours = ranks.fp8_trained_over_ranks(Alone(), slice(None), device)
    assert_bitwise_equal(actual, expected)
    for grad, reference in zip(ours, grads, strict=True):
        error = float((grad.float() - reference.float()).norm())
        assert error <= 2**-7 * float(reference.float().norm())


class Reversed(Alone):
    """One rank: rows arrive last to first."""

    def deliver(self, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return rows.flip(0)


def test_control_arrival_order_instead_of_the_slot_differs() -> None:
    given, placement = ranks.whole("cpu"), ExpertPlacement(ranks.SHAPE.experts, 1)
    x, ids = given["x"], given["ids"]
    arrived = dispatch(x, ids, Reversed(), placement)
    sent = x[(ids >= 0).nonzero()[:, 0]]
    assert not bitwise_equal(arrived.values, sent), "rows in the order of arrival"
    home = give_back(arrived, Reversed(), ids)
    assert_bitwise_equal(home[ids >= 0], sent, "rows by token and slot")


def test_fp8_experts_travel_in_the_model_dtype() -> None:
    # Rows are quantized at the expert's rank; whatever the order of arrival, each is the same.
    x = hazard_activations((9, 256), seed=3)
    ids, _ = routing(Shape(5, 3, 256, 128), 9, "cpu", seed=4)
    stacked = [
        quantize_expert_weight(master, scale_format="fp32", impl="reference")
        for master in masters(Shape(5, 3, 256, 128), "cpu")
    ]

    def outputs(rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        return fp8_expert_outputs(rows, *stacked, local, scale_format="fp32", impl="reference")

    y = over_ranks(x, ids, outputs, exchange=Reversed(), placement=ExpertPlacement(5, 1))
    assert_bitwise_equal(y[ids >= 0], outputs(x, ids)[ids >= 0])


def test_expert_parallel_rejects_bad_inputs() -> None:
    given, placement = ranks.whole("cpu"), ExpertPlacement(ranks.SHAPE.experts, 1)
    x, ids = given["x"], given["ids"]
    with pytest.raises(InvalidInputError, match="world_size must be between 1 and num_experts=4"):
        ExpertPlacement(4, 5)
    with pytest.raises(InvalidInputError, match=r"ids must be in \[-1, 11\), got 11 to 11"):
        dispatch(x, torch.full_like(ids, 11), Alone(), placement)
    with pytest.raises(InvalidInputError, match="placement must be for 1 ranks, got 2"):
        dispatch(x, ids, Alone(), ExpertPlacement(11, 2))
    with pytest.raises(InvalidInputError, match=r"ids must be \[37, K\], got \(5, 3\)"):
        dispatch(x, ids[:5], Alone(), placement)
    for wrong in (x[0], x[:, :0], x[0, 0]):
        with pytest.raises(
            InvalidInputError, match=r"x must be \[T, H\] of at least one column, g"
        ):
            dispatch(wrong, ids, Alone(), placement)
    for wrong in (x, x[:, None]):
        with pytest.raises(InvalidInputError, match=r"values must be \[T, K, H\] of ids \(37, 3\)"):
            dispatch_slots(wrong, ids, Alone(), placement)
    for wrong in (ids.float(), ids.bool()):
        with pytest.raises(InvalidInputError, match=r"ids must be int32 or int64, got torch\."):
            dispatch(x, wrong, Alone(), placement)
    with pytest.raises(InvalidInputError, match="ids must be on cpu, got meta"):
        dispatch(x, ids.to("meta"), Alone(), placement)
    w13, w2 = (
        prepare_expert_weight(w[:4], dtype=torch.bfloat16, impl="reference")
        for w in ranks.masters(ranks.SHAPE, "cpu")
    )
    with pytest.raises(
        InvalidInputError, match=r"w13 must be .* of 11 experts \(0 to 10\), got \(4, 80"
    ):
        expert_parallel_outputs(
            x, w13, w2, ids, exchange=Alone(), placement=placement, impl="reference"
        )


def test_deep_ep_is_refused_where_it_is_not_installed() -> None:
    with pytest.raises(UnsupportedError, match=r"without the package deep_ep.*supported: AllToAll"):
        DeepEP(None)


class Second(Alone):
    """The second of two ranks, to whom nothing is sent."""

    rank, world_size = 1, 2

    def deliver(self, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return rows[:0]


def test_trainers_functions_refuse_the_experts_of_other_ranks() -> None:
    """With all experts on every rank, local ids would name the first rank's without a word."""
    parallel = ExpertParallel(Second(), ExpertPlacement(ranks.FP8_SHAPE.experts, 2))
    stacked, given = ranks.fp8_of(slice(None), "cpu")
    own = masters(ranks.FP8_SHAPE, "cpu")
    routed = (given["ids"][:0], given["weights"][:0], None)
    expected = r"w13 must be of 5 experts \(6 to 10\), got 11"
    with pytest.raises(InvalidInputError, match=expected):
        Fp8ExpertParallelFunction.apply(
            given["x"][:0], *own, *routed, stacked, "fp32", parallel, None, "reference"
        )
    prepared = [prepare_expert_weight(w, dtype=torch.bfloat16, impl="reference") for w in own]
    local = [w[6:].contiguous() for w in own]
    with pytest.raises(InvalidInputError, match=r"prepared must be of 5 experts"):
        ExpertParallelFunction.apply(
            given["x"][:0], *local, *routed, prepared, parallel, None, "reference"
        )
