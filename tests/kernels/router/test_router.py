"""Relations of the router: rows alone and together, ties, groups, padding; against fp64."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from router_cases import DEEPSEEK_V3, DEEPSEEK_V4, MODELS, QWEN3, case, exact_scores

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.router import RouterParameters, hash_expert_ids, router
from consistent_kernels.testing import (
    MANY_BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    poisoned_rows,
)


def exact_weights(logits: torch.Tensor, ids: torch.Tensor, p: RouterParameters) -> torch.Tensor:
    weights = exact_scores(logits, p.scoring).gather(1, ids.long())
    if p.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * p.scale


@pytest.mark.parametrize("name", MODELS)
def test_router_matches_reference(impl_device: tuple[str, str], name: str) -> None:
    impl, device = impl_device
    logits, bias, p = case(name, 200, device, seed=1)
    ids, weights = router(logits, bias, parameters=p, impl=impl)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    exact = exact_weights(logits, ids, p)
    # A score is good to a few units: l - max is off by 2^-24 of its magnitude, which the
    # exponential turns into a relative error, then exp, a sum of E terms, a division; softplus
    # and root less. The sum over K slots, its division and the scale add K + 3 roundings.
    magnitude = float((logits - logits.amax(-1, keepdim=True)).abs().max())
    bound = exact.abs() * (magnitude + p.num_experts.bit_length() + p.top_k + 16) * 2**-23
    assert bool(((weights.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("name", MODELS)
def test_router_chooses_as_the_definition(impl_device: tuple[str, str], name: str) -> None:
    impl, device = impl_device
    logits, bias, p = case(name, 60, device, seed=2)
    ids, _ = router(logits, bias, parameters=p, impl=impl)
    # The scores of the same implementation, for a tie in fp32 need not be one in fp64.
    all_ids = torch.arange(p.num_experts, dtype=torch.int32, device=device)
    everything = RouterParameters(p.num_experts, p.num_experts, p.scoring, renormalize=False)
    forced = all_ids.expand(60, -1).contiguous()
    _, scores = router(logits, parameters=everything, forced=forced, impl=impl)
    choice = (scores if bias is None else scores + bias).cpu()
    for row in range(60):
        values = choice[row].tolist()
        size = p.group_size
        groups = [sorted(values[g * size : (g + 1) * size]) for g in range(p.num_groups)]
        as_fp32 = torch.tensor([g[-2:] for g in groups])
        best = as_fp32.sum(-1).tolist() if bias is not None else [g[-1] for g in groups]
        kept = sorted(range(p.num_groups), key=lambda g: (-best[g], g))[: p.top_groups]
        allowed = [e for e in range(p.num_experts) if e // size in kept]
        expected = sorted(allowed, key=lambda e: (-values[e], e))[: p.top_k]
        assert ids[row].tolist() == expected, f"row {row}"


@pytest.mark.parametrize("name", MODELS)
def test_router_is_batch_invariant(impl_device: tuple[str, str], name: str) -> None:
    impl, device = impl_device
    most = 2100
    logits, bias, p = case(name, most, device, seed=3)
    whole = router(logits, bias, parameters=p, impl=impl)
    for rows in MANY_BATCH_SIZES:
        for start in {0, 5, most - rows}:
            part = slice(start, start + rows)
            for got, expected in zip(
                router(logits[part], bias, parameters=p, impl=impl), whole, strict=True
            ):
                assert_bitwise_equal(got, expected[part], f"rows {start} to {start + rows}")
    order = torch.randperm(most, generator=torch.Generator().manual_seed(0)).to(device)
    for got, expected in zip(
        router(logits[order], bias, parameters=p, impl=impl), whole, strict=True
    ):
        assert_bitwise_equal(got, expected[order])


def test_router_is_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits, bias, p = case("deepseek-v3", 129, device, seed=4)
    first = router(logits, bias, parameters=p, impl=impl)
    for _ in range(10):
        for got, expected in zip(router(logits, bias, parameters=p, impl=impl), first, strict=True):
            assert_bitwise_equal(got, expected)


@pytest.mark.parametrize("name", MODELS)
def test_router_lower_id_wins_ties(impl_device: tuple[str, str], name: str) -> None:
    impl, device = impl_device
    p = MODELS[name]
    logits = torch.zeros((3, p.num_experts), device=device)
    logits[1] = -0.0
    ids, weights = router(logits, parameters=p, impl=impl)
    expected = torch.arange(p.top_k, dtype=torch.int32, device=device).expand(3, -1)
    assert_bitwise_equal(ids, expected.contiguous())
    assert bool((weights == weights[:, :1]).all())


def test_router_minus_infinity_chooses_no_expert_twice(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    for p in (DEEPSEEK_V3, DEEPSEEK_V4):
        bias = torch.full((p.num_experts,), float("-inf"), device=device)
        bias[77] = 0.0
        ids, _ = router(
            torch.zeros((2, p.num_experts), device=device), bias, parameters=p, impl=impl
        )
        for row in ids.tolist():
            assert row[0] == 77
            assert len(set(row)) == p.top_k
            if p.num_groups > 1:
                groups = {e // p.group_size for e in row}
                assert len(groups) <= p.top_groups


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4"])
def test_router_chooses_nan_as_minus_infinity(impl_device: tuple[str, str], name: str) -> None:
    impl, device = impl_device
    logits, bias, p = case(name, 33, device, seed=15)
    first, _ = router(logits, bias, parameters=p, impl=impl)
    never = bias.clone()
    for best in first[0].tolist()[:3]:
        # The best experts of a row, one more each time; groups count without them too.
        logits[:, best] = float("nan")
        never[best] = float("-inf")
        ids, weights = router(logits, bias, parameters=p, impl=impl)
        finite = logits.nan_to_num(nan=0.0)
        expected = router(finite, never, parameters=p, impl=impl)
        assert_bitwise_equal(ids, expected[0])
        assert_bitwise_equal(weights, expected[1])
    assert not bitwise_equal(ids, first)
    # Where nothing else is left it is chosen, and shows.
    few = RouterParameters(8, 8, p.scoring, renormalize=True)
    logits[:, 3] = float("nan")
    ids, weights = router(logits[:, :8], bias[:8].contiguous(), parameters=few, impl=impl)
    assert bool(weights.isnan().all())
    assert bool(ids.sort().values.eq(torch.arange(8, device=device)).all())


@pytest.mark.parametrize("name", MODELS)
def test_router_ignores_poison(impl_device: tuple[str, str], name: str) -> None:
    impl, device = impl_device
    logits, bias, p = case(name, 9, device, seed=6)
    expected = router(logits, bias, parameters=p, impl=impl)
    buffer, rows = poisoned_rows(logits, before=3, after=4)
    ids, weights = router(buffer, bias, parameters=p, impl=impl)
    assert_bitwise_equal(ids[rows], expected[0])
    assert_bitwise_equal(weights[rows], expected[1])
    # A poisoned row stays visible in its weights and names experts that exist.
    assert bool(weights[:3].isnan().all())
    assert bool(((ids >= 0) & (ids < p.num_experts)).all())
    wide = torch.full((9, 2 * p.num_experts), float("nan"), device=device)
    wide[:, : p.num_experts] = logits
    ids, weights = router(wide[:, : p.num_experts], bias, parameters=p, impl=impl)
    assert_bitwise_equal(ids, expected[0])
    assert_bitwise_equal(weights, expected[1])


def test_router_padded_rows_go_nowhere(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits, bias, p = case("deepseek-v3", 9, device, seed=7)
    expected = router(logits, bias, parameters=p, impl=impl)
    buffer, rows = poisoned_rows(logits, before=0, after=7)
    valid = torch.zeros(16, dtype=torch.bool, device=device)
    valid[rows] = True
    ids, weights = router(buffer, bias, parameters=p, valid=valid, impl=impl)
    assert_bitwise_equal(ids[rows], expected[0])
    assert_bitwise_equal(weights[rows], expected[1])
    assert bool((ids[9:] == -1).all())
    assert_bitwise_equal(weights[9:], torch.zeros((7, p.top_k), device=device))


def test_router_hash_layer_weights_the_given_experts(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits, bias, p = case("deepseek-v4", 20, device, seed=8)
    generator = torch.Generator().manual_seed(9)
    table = torch.stack([torch.randperm(256, generator=generator)[:6] for _ in range(50)])
    tokens = torch.randint(50, (20,), generator=generator)
    forced = hash_expert_ids(table.to(device), tokens.to(device), num_experts=256)
    ids, weights = router(logits, parameters=p, forced=forced, impl=impl)
    assert_bitwise_equal(ids.cpu(), table[tokens].int())
    chosen, chosen_weights = router(logits, bias, parameters=p, impl=impl)
    # The rule of the weights is the same: given the experts that were chosen, so are the bits.
    _, again = router(logits, bias, parameters=p, forced=chosen, impl=impl)
    assert_bitwise_equal(again, chosen_weights)
    assert not bitwise_equal(weights, chosen_weights)


def test_router_hash_layer_ignores_poisoned_ids(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits, _, p = case("deepseek-v4", 5, device, seed=8)
    forced = torch.arange(30, dtype=torch.int32, device=device).view(5, 6)
    expected = router(logits, parameters=p, forced=forced, impl=impl)
    buffer, rows = poisoned_rows(logits, before=1, after=2)
    valid = torch.zeros(8, dtype=torch.bool, device=device)
    valid[rows] = True
    for poison in (-7, 256, 2**31 - 1):
        wide = torch.full((8, 6), poison, dtype=torch.int32, device=device)
        wide[rows] = forced
        ids, weights = router(buffer, parameters=p, forced=wide, valid=valid, impl=impl)
        assert_bitwise_equal(ids[rows], expected[0])
        assert_bitwise_equal(weights[rows], expected[1])
        assert bool((ids[~valid] == -1).all())
        assert not bool(weights[~valid].any())
        # The same ids in rows that are tokens are refused where they can be looked at.
        if device == "cpu":
            with pytest.raises(InvalidInputError, match=r"forced must be expert ids in \[0, 256\)"):
                router(buffer, parameters=p, forced=wide, impl=impl)


def test_control_rounding_logits_to_bf16_moves_experts(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits, bias, p = case("deepseek-v3", 1000, device, seed=10)
    ids, _ = router(logits, bias, parameters=p, impl=impl)
    early, _ = router(logits.bfloat16().float(), bias, parameters=p, impl=impl)
    moved = (ids != early).any(-1).float().mean()
    assert float(moved) > 0.01


def test_control_bias_in_the_weight_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits, bias, p = case("deepseek-v3", 65, device, seed=11)
    ids, weights = router(logits, bias, parameters=p, impl=impl)
    biased = (torch.sigmoid(logits) + bias).gather(1, ids.long())
    biased = biased / biased.sum(-1, keepdim=True) * p.scale
    assert not bitwise_equal(biased, weights)


def test_control_torch_topk_breaks_ties_elsewhere() -> None:
    # Why the spec states a tie rule: stock code leaves the winner to torch.topk.
    scores = torch.zeros((1, 384))
    assert torch.topk(scores, 8).indices[0].tolist() != list(range(8))


def test_router_sums_slots_in_order(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits, _, p = case("qwen3", 257, device, seed=12)
    raw = RouterParameters(p.num_experts, p.num_experts, "softmax", renormalize=False)
    forced = torch.arange(128, dtype=torch.int32, device=device).expand(257, -1).contiguous()
    _, scores = router(logits, parameters=raw, forced=forced, impl=impl)
    ids, weights = router(logits, parameters=p, impl=impl)
    chosen = scores.gather(1, ids.long())

    def over_sum(slots: Iterable[int]) -> torch.Tensor:
        total = torch.zeros(257, device=device)
        for slot in slots:
            total = total + chosen[:, slot]
        return chosen / total[:, None]

    assert_bitwise_equal(over_sum(range(p.top_k)), weights)
    for other in (reversed(range(p.top_k)), (0, 7, 6, 5, 4, 3, 2, 1), (0, 2, 1, 3, 4, 5, 6, 7)):
        assert not bitwise_equal(over_sum(other), weights), "another order shows"


def test_router_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    logits, bias, p = case("deepseek-v3", 17, device, seed=13)

    def route(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return router(value, bias, parameters=p, impl=impl)

    compiled = torch.compile(
        route, backend="inductor" if device == "cuda" else "aot_eager", fullgraph=True
    )
    for got, expected in zip(compiled(logits), route(logits), strict=True):
        assert_bitwise_equal(got, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_router_graph_replay_equals_eager(name: str) -> None:
    logits, bias, p = case(name, 64, "cuda", seed=14)
    expected = router(logits, bias, parameters=p, impl="triton")
    static = torch.zeros_like(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = router(static, bias, parameters=p, impl="triton")
    static.copy_(logits)
    graph.replay()
    for got, eager in zip(captured, expected, strict=True):
        assert_bitwise_equal(got, eager)


def test_router_of_no_rows_is_empty(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    ids, weights = router(torch.empty((0, 128), device=device), parameters=QWEN3, impl=impl)
    assert ids.shape == weights.shape == (0, 8)


def test_router_rejects_bad_inputs() -> None:
    logits = torch.zeros(2, 128)

    def call(**changes: object) -> None:
        router(**({"logits": logits, "parameters": QWEN3, "impl": "reference"} | changes))

    with pytest.raises(
        InvalidInputError, match=r"router: logits must be \[T, 128\], got \(2, 64\)"
    ):
        call(logits=logits[:, :64])
    with pytest.raises(
        InvalidInputError, match=r"torch\.float32, got torch\.bfloat16\. Call linear"
    ):
        call(logits=logits.bfloat16())
    with pytest.raises(InvalidInputError, match=r"bias must be torch\.float32 of shape \(128,\)"):
        call(bias=torch.zeros(128, dtype=torch.bfloat16))
    with pytest.raises(InvalidInputError, match=r"forced must be .* of shape \(2, 8\)"):
        call(forced=torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(InvalidInputError, match=r"valid must be torch\.bool of shape \(2,\)"):
        call(valid=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(
        UnsupportedError, match="impl 'cuda' is not supported; supported: reference"
    ):
        call(impl="cuda")
    table, tokens = torch.tensor([[0, 300]]), torch.tensor([0])
    with pytest.raises(InvalidInputError, match=r"expert ids in \[0, 256\), got 0 to 300"):
        hash_expert_ids(table, tokens, num_experts=256)
    with pytest.raises(InvalidInputError, match=r"token_ids must be in \[0, 1\), got 0 to 1"):
        hash_expert_ids(table, torch.tensor([0, 1]), num_experts=256)
    with pytest.raises(InvalidInputError, match="token_ids must be on cpu, got meta"):
        hash_expert_ids(table, tokens.to("meta"), num_experts=256)
    for wrong in (-1, 128):
        forced = torch.full((2, 8), wrong, dtype=torch.int32)
        with pytest.raises(
            InvalidInputError, match=rf"forced must be .* \[0, 128\), got {wrong} to"
        ):
            call(forced=forced)


def test_router_parameters_reject_what_cannot_be() -> None:
    with pytest.raises(UnsupportedError, match="scoring 'tanh' is not supported; supported: soft"):
        RouterParameters(8, 2, "tanh", renormalize=True)
    with pytest.raises(InvalidInputError, match="top_k must be between 1 and num_experts=8, got 9"):
        RouterParameters(8, 9, "softmax", renormalize=True)
    with pytest.raises(InvalidInputError, match="num_groups must be a divisor of 8, got 3"):
        RouterParameters(8, 2, "softmax", renormalize=True, num_groups=3)
    with pytest.raises(InvalidInputError, match="enough groups of 2 experts for top_k=3, got 1"):
        RouterParameters(8, 3, "softmax", renormalize=True, num_groups=4, top_groups=1)
    for scale in (float("nan"), float("inf"), 0.0, -2.5):
        with pytest.raises(InvalidInputError, match="scale must be positive and finite, got"):
            RouterParameters(8, 2, "softmax", renormalize=True, scale=scale)
    for wrong in (2.0, True, "2"):
        with pytest.raises(InvalidInputError, match=f"top_k must be an int, got {wrong!r}"):
            RouterParameters(8, wrong, "softmax", renormalize=True)
