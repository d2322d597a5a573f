"""Relations of the experts: rows alone and together, layouts, counts, slots; against fp64."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from expert_cases import SHAPES, Shape, masters, prepared, routing, tokens
from implementations import DEEP_GEMM_CUDA, TRITON_CUDA

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.experts import (
    combine,
    expert_outputs,
    experts,
    prepare_expert_weight,
)
from consistent_kernels.experts.spec import LAYOUTS
from consistent_kernels.linear import linear, prepare_weight
from consistent_kernels.silu_and_mul import silu_and_mul
from consistent_kernels.testing import (
    MANY_BATCH_SIZES,
    assert_bitwise_equal,
    bitwise_equal,
    hazard_activations,
    poisoned_rows,
    round_early,
)

TINY, QWEN3 = SHAPES["tiny"], SHAPES["qwen3-like"]


def elementwise(impl: str) -> str:
    """The implementation of the ops that have no oneDNN program."""
    return "triton" if impl in ("triton", "deep_gemm") else "reference"


def row_by_row(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, impl: str, **options
) -> torch.Tensor:
    """One call a token."""
    rows = [
        expert_outputs(x[i : i + 1], w13, w2, ids[i : i + 1], impl=impl, **options)
        for i in range(x.shape[0])
    ]
    return torch.cat(rows)


def assert_same_slots(
    actual: torch.Tensor, expected: torch.Tensor, ids: torch.Tensor, msg: str = ""
) -> None:
    """Slots that go nowhere are unspecified."""
    assert_bitwise_equal(actual[ids >= 0], expected[ids >= 0], msg)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("name", SHAPES)
def test_experts_matches_reference(
    impl_device: tuple[str, str], name: str, limit: float | None
) -> None:
    impl, device = impl_device
    shape = SHAPES[name]
    x = tokens(shape, 65, device, seed=1)
    ids, weights = routing(shape, 65, device, seed=2)
    w13, w2 = prepared(shape, impl, device)
    shared = hazard_activations((65, shape.hidden), seed=3, device=device)
    out = experts(x, w13, w2, ids, weights, shared, limit=limit, impl=impl)
    assert out.dtype == x.dtype
    exact, bound = exact_experts(x, w13, w2, ids, weights, shared, limit)
    assert bool(((out.double() - exact).abs() <= bound).all())


def exact_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor,
    limit: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 result, and a bound that carries every rounding point of the spec forward.

    u is half a unit of bf16, n 2^-23 an fp32 sum of n products (2^-23 for hardware that truncates).
    gate and up: |error| <= K 2^-23 sum |x||w| + u |value|. silu has slope at most 1.1. Then a
    rounding; the down GEMM passes errors on through |w2| and adds its own; the combination adds
    K + 2 fp32 roundings and one of bf16.
    """
    u, tiny = 2.0**-8, 2.0**-23
    exact, bound = torch.zeros_like(x.double()), torch.zeros_like(x.double())
    for row in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[row, slot])
            if expert < 0:
                continue
            a, b = w13[expert].double(), w2[expert].double()
            gate_up = a @ x[row].double()
            error = x.shape[1] * tiny * (a.abs() @ x[row].double().abs()) + u * gate_up.abs()
            gate, up = gate_up.chunk(2)
            gate_error, up_error = error.chunk(2)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            silu = gate * torch.sigmoid(gate)
            hidden = silu * up
            hidden_error = 1.1 * gate_error * (up.abs() + up_error) + silu.abs() * up_error
            hidden_error = hidden_error * (1 + u) + hidden.abs() * (u + 8 * tiny)
            y = b @ hidden
            y_error = b.abs() @ (hidden_error + b.shape[1] * tiny * (hidden.abs() + hidden_error))
            y_error = y_error * (1 + u) + y.abs() * u
            weight = float(weights[row, slot])
            exact[row] += weight * y
            bound[row] += weight * (y_error + (ids.shape[1] + 2) * tiny * y.abs())
    exact += shared.double()
    return exact, bound * (1 + u) + exact.abs() * u + shared.double().abs() * 4 * tiny


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_experts_is_batch_invariant(impl_device: tuple[str, str], name: str, layout: str) -> None:
    impl, device = impl_device
    shape = SHAPES[name]
    most = 2100
    x = tokens(shape, most, device, seed=4)
    ids, weights = routing(shape, most, device, seed=5)
    w13, w2 = prepared(shape, impl, device)
    whole = experts(x, w13, w2, ids, weights, layout=layout, impl=impl)
    for rows in (*MANY_BATCH_SIZES, most - 7):
        for start in {0, 5, most - rows}:
            part = slice(start, start + rows)
            out = experts(x[part], w13, w2, ids[part], weights[part], layout=layout, impl=impl)
            assert_bitwise_equal(out, whole[part], f"rows {start} to {start + rows}")
    order = torch.randperm(most, generator=torch.Generator().manual_seed(0)).to(device)
    shuffled = experts(x[order], w13, w2, ids[order], weights[order], layout=layout, impl=impl)
    assert_bitwise_equal(shuffled, whole[order])


@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257])
def test_experts_rows_do_not_follow_the_count_of_their_expert(
    impl_device: tuple[str, str], count: int
) -> None:
    impl, device = impl_device
    x = tokens(TINY, count, device, seed=6)
    w13, w2 = prepared(TINY, impl, device)
    ids = torch.full((count, 1), 3, dtype=torch.int32, device=device)
    whole = expert_outputs(x, w13, w2, ids, impl=impl)
    some = [0, count // 2, count - 1]
    assert_bitwise_equal(whole[some], row_by_row(x[some], w13, w2, ids[some], impl))


@pytest.mark.parametrize("name", SHAPES)
def test_experts_masked_layout_equals_contiguous(impl_device: tuple[str, str], name: str) -> None:
    impl, device = impl_device
    shape = SHAPES[name]
    w13, w2 = prepared(shape, impl, device)
    for rows in (1, 7, 64, 129):
        x = tokens(shape, rows, device, seed=7)
        ids, _ = routing(shape, rows, device, seed=8)
        contiguous = expert_outputs(x, w13, w2, ids, layout="contiguous", impl=impl)
        masked = expert_outputs(x, w13, w2, ids, layout="masked", impl=impl)
        assert_same_slots(masked, contiguous, ids, f"{rows} rows")


def test_experts_counts_of_every_kind_share_a_call(impl_device: tuple[str, str]) -> None:
    # Experts with 5, 0, 130, 1, 64, 17, 3 and 200 rows, as in a measured case of the library.
    impl, device = impl_device
    counts = (5, 0, 130, 1, 64, 17, 3, 200)
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])[:, None].int()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(9))
    ids = ids[order].to(device)
    x = tokens(TINY, len(ids), device, seed=10)
    w13, w2 = prepared(TINY, impl, device)
    for layout in ("contiguous", "masked"):
        y = expert_outputs(x, w13, w2, ids, layout=layout, impl=impl)
        for expert in (0, 3, 5):
            rows = (ids[:, 0] == expert).nonzero()[:, 0]
            alone = expert_outputs(x[rows], w13, w2, ids[rows], impl=impl)
            assert_bitwise_equal(y[rows], alone, f"expert {expert}, {layout}")


def test_experts_equal_a_dense_mlp(impl_device: tuple[str, str]) -> None:
    # One expert of its own is the dense MLP of the same implementation, bit for bit (R11 too: the
    # dense gate and up are separate GEMMs).
    impl, device = impl_device
    shape = Shape(4, 1, 192, 128)
    x = tokens(shape, 33, device, seed=11)
    master13, master2 = masters(shape, device)
    w13, w2 = prepared(shape, impl, device)
    y = expert_outputs(
        x, w13, w2, torch.full((33, 1), 2, dtype=torch.int32, device=device), impl=impl
    )
    gate, up, down = (
        prepare_weight(weight.contiguous(), dtype=x.dtype, impl=impl)
        for weight in (master13[2, :128], master13[2, 128:], master2[2])
    )
    hidden = silu_and_mul(
        linear(x, gate, impl=impl), linear(x, up, impl=impl), impl=elementwise(impl)
    )
    assert_bitwise_equal(y[:, 0], linear(hidden, down, impl=impl))


def test_experts_ignore_where_an_expert_stands(impl_device: tuple[str, str]) -> None:
    # The relation behind expert parallelism: local ids, fewer experts, the same bits.
    impl, device = impl_device
    x = tokens(QWEN3, 40, device, seed=12)
    ids, _ = routing(QWEN3, 40, device, seed=13)
    w13, w2 = prepared(QWEN3, impl, device)
    whole = expert_outputs(x, w13, w2, ids, impl=impl)
    for first in range(0, 16, 4):
        local = torch.where((ids >= first) & (ids < first + 4), ids - first, -1)
        part = slice(first, first + 4)
        y = expert_outputs(x, w13[part], w2[part], local, impl=impl)
        assert_same_slots(y, whole, local, f"experts {first} to {first + 4}")


def test_experts_ignore_poison(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = tokens(TINY, 9, device, seed=14)
    ids, weights = routing(TINY, 9, device, seed=15)
    w13, w2 = prepared(TINY, impl, device)
    expected = experts(x, w13, w2, ids, weights, impl=impl)
    buffer, rows = poisoned_rows(x, before=3, after=4)
    for nowhere in (-1, 1):
        # Poisoned tokens that go nowhere, and poisoned tokens of an expert that serves others.
        wide = torch.full((16, TINY.slots), nowhere, dtype=torch.int32, device=device)
        if nowhere == 1:
            wide[:, 1] = 2
        wide[rows] = ids
        scale = torch.ones((16, TINY.slots), device=device)
        scale[rows] = weights
        for layout in ("contiguous", "masked"):
            out = experts(buffer, w13, w2, wide, scale, layout=layout, impl=impl)
            assert_bitwise_equal(out[rows], expected, layout)
            assert bool(out[:3].isnan().all()) == (nowhere == 1)
    # An expert that no row chose may hold anything.
    broken13, broken2 = w13.clone(), w2.clone()
    broken13[-1], broken2[-1] = float("nan"), float("nan")
    assert_bitwise_equal(experts(x, broken13, broken2, ids, weights, impl=impl), expected)


def test_experts_is_run_to_run_stable(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = tokens(QWEN3, 129, device, seed=16)
    ids, weights = routing(QWEN3, 129, device, seed=17)
    w13, w2 = prepared(QWEN3, impl, device)
    first = experts(x, w13, w2, ids, weights, impl=impl)
    for _ in range(5):
        assert_bitwise_equal(experts(x, w13, w2, ids, weights, impl=impl), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_combine_adds_in_slot_order_and_rounds_once(
    impl_device: tuple[str, str], dtype: torch.dtype
) -> None:
    impl, device = impl_device
    y = hazard_activations((33, 4, 72), seed=18, device=device, dtype=dtype)
    ids, weights = routing(Shape(9, 4, 72, 1), 33, device, seed=19)
    shared = hazard_activations((33, 72), seed=20, device=device, dtype=dtype)
    # Slots 0 and 2 cancel: what is added in between loses bits, so that the order shows.
    y[:, 2] = y[:, 0]
    weights[:, 0], weights[:, 2] = 2.0**14, -(2.0**14)

    def total(slots: Iterable[int], start: torch.Tensor | None = None) -> torch.Tensor:
        sum_ = torch.zeros((33, 72), device=device) if start is None else start.float()
        for slot in slots:
            term = weights[:, slot, None] * y[:, slot].float()
            sum_ = sum_ + torch.where(ids[:, slot, None] >= 0, term, 0.0)
        return sum_

    plain, with_shared = total(range(4)).to(dtype), (total(range(4)) + shared.float()).to(dtype)
    assert_bitwise_equal(combine(y, ids, weights, impl=impl), plain)
    assert_bitwise_equal(combine(y, ids, weights, shared, impl=impl), with_shared)
    for other in (total(reversed(range(4))), total((0, 2, 1, 3))):
        assert not bitwise_equal(other.to(dtype), plain), "another order shows"
    assert not bitwise_equal(total(range(4), shared).to(dtype), with_shared), "shared is the last"
    y[ids < 0] = float("nan")
    assert_bitwise_equal(combine(y, ids, weights, shared, impl=impl), with_shared)


def test_experts_sum_in_slot_order(impl_device: tuple[str, str]) -> None:
    # Expert 2 is expert 0 over again; their weights cancel what they add.
    impl, device = impl_device
    w13, w2 = (w.clone() for w in prepared(QWEN3, impl, device))
    w13[2], w2[2] = w13[0], w2[0]
    x = tokens(QWEN3, 65, device, seed=38)
    ids = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device).repeat(65, 1)
    weights = torch.tensor([[2.0**14, 1.0, -(2.0**14)]], device=device).repeat(65, 1)
    y = expert_outputs(x, w13, w2, ids, impl=impl).float()
    terms = (weights[:, :, None] * y).unbind(1)
    for layout in LAYOUTS:
        out = experts(x, w13, w2, ids, weights, layout=layout, impl=impl)
        assert_bitwise_equal(out, ((terms[0] + terms[1]) + terms[2]).bfloat16(), layout)
    assert not bitwise_equal(out, ((terms[0] + terms[2]) + terms[1]).bfloat16())


def test_control_another_slot_order_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    y = hazard_activations((257, 8, 72), seed=21, device=device, dtype=torch.float32)
    ids, weights = routing(Shape(16, 8, 72, 1), 257, device, seed=22)
    out = combine(y, ids, weights, impl=impl)
    assert not bitwise_equal(combine(y.flip(1), ids.flip(1), weights.flip(1), impl=impl), out)


def test_control_rounding_each_slot_differs(impl_device: tuple[str, str]) -> None:
    # What a bf16 index_add (stock Hugging Face) or a reduce-scatter of bf16 partial sums does.
    impl, device = impl_device
    y = hazard_activations((65, 4, 72), seed=23, device=device)
    ids, weights = routing(Shape(9, 4, 72, 1), 65, device, seed=24)
    total = torch.zeros((65, 72), device=device)
    for slot in range(4):
        term = torch.where(
            ids[:, slot, None] >= 0, weights[:, slot, None] * y[:, slot].float(), 0.0
        )
        total = round_early(total + round_early(term))
    assert not bitwise_equal(total.bfloat16(), combine(y, ids, weights, impl=impl))


def test_control_weight_before_the_down_projection_differs(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    shape = QWEN3
    x = tokens(shape, 33, device, seed=25)
    ids, weights = routing(shape, 33, device, seed=26)
    ids, weights = ids[:, :1].contiguous(), weights[:, :1].contiguous()
    w13, w2 = prepared(shape, impl, device)
    out = experts(x, w13, w2, ids, weights, impl=impl)
    early = torch.zeros_like(out)
    for row in range(33):
        expert = int(ids[row, 0])
        if expert < 0:
            continue
        gate, up = (w13[expert].float() @ x[row].float()).bfloat16().float().chunk(2)
        hidden = (torch.nn.functional.silu(gate) * up * weights[row, 0]).bfloat16()
        early[row] = (w2[expert].float() @ hidden.float()).bfloat16()
    assert not bitwise_equal(early, out)


def test_control_stock_grouped_gemm_follows_the_batch() -> None:
    # The same layer through library GEMMs on fp32: an expert's rows see each other.
    x = tokens(QWEN3, 64, "cpu", seed=27, dtype=torch.float32)
    w13, _ = masters(QWEN3, "cpu")
    whole = torch.nn.functional.linear(x, w13[0])
    alone = torch.cat([torch.nn.functional.linear(x[i : i + 1], w13[0]) for i in range(64)])
    assert not bitwise_equal(alone, whole)


def test_control_early_rounding_of_the_gate_differs(impl_device: tuple[str, str]) -> None:
    # Hugging Face rounds silu(gate) before it multiplies.
    impl, device = impl_device
    x = tokens(QWEN3, 64, device, seed=28)
    w13, w2 = prepared(QWEN3, impl, device)
    ids = torch.zeros((64, 1), dtype=torch.int32, device=device)
    y = expert_outputs(x, w13, w2, ids, impl=impl)[:, 0]
    gate, up = linear(x, w13[0], impl=impl).chunk(2, dim=1)
    hidden = torch.nn.functional.silu(gate) * up
    assert not bitwise_equal(linear(hidden.contiguous(), w2[0], impl=impl), y)


def test_experts_clamp_is_deepseek_v4s(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = tokens(QWEN3, 65, device, seed=29)
    w13, w2 = prepared(QWEN3, impl, device)
    ids, _ = routing(QWEN3, 65, device, seed=30)
    free = expert_outputs(x, w13, w2, ids, impl=impl)
    assert_same_slots(expert_outputs(x, w13, w2, ids, limit=1e4, impl=impl), free, ids)
    clamped = expert_outputs(x, w13, w2, ids, limit=0.25, impl=impl)
    assert not bitwise_equal(clamped[ids >= 0], free[ids >= 0])


def test_experts_compiled_equals_eager(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    x = tokens(TINY, 17, device, seed=31)
    ids, weights = routing(TINY, 17, device, seed=32)
    w13, w2 = prepared(TINY, impl, device)

    def layer(value: torch.Tensor) -> torch.Tensor:
        return experts(value, w13, w2, ids, weights, impl=impl)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(x), layer(x))


@pytest.mark.parametrize("impl_device", [TRITON_CUDA, DEEP_GEMM_CUDA], indirect=True)
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_experts_graph_replay_equals_eager(impl_device: tuple[str, str], layout: str) -> None:
    """One graph of 64 rows; the rows that a batch leaves unused are poisoned and go nowhere."""
    impl, _ = impl_device
    w13, w2 = prepared(QWEN3, impl, "cuda")
    static_x = torch.zeros((64, QWEN3.hidden), dtype=torch.bfloat16, device="cuda")
    static_ids = torch.full((64, QWEN3.slots), -1, dtype=torch.int32, device="cuda")
    static_weights = torch.zeros((64, QWEN3.slots), device="cuda")

    def layer() -> torch.Tensor:
        return experts(static_x, w13, w2, static_ids, static_weights, layout=layout, impl=impl)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for rows in (1, 7, 64):
        x = tokens(QWEN3, rows, "cuda", seed=33)
        ids, weights = routing(QWEN3, rows, "cuda", seed=34)
        static_x.fill_(float("nan"))
        static_ids.fill_(-1)
        static_x[:rows], static_ids[:rows], static_weights[:rows] = x, ids, weights
        graph.replay()
        eager = experts(x, w13, w2, ids, weights, layout=layout, impl=impl)
        assert_bitwise_equal(captured[:rows], eager, f"{rows} rows")


def test_experts_of_no_rows_are_empty(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    w13, w2 = prepared(TINY, impl, device)
    x = torch.empty((0, TINY.hidden), dtype=torch.bfloat16, device=device)
    ids, weights = routing(TINY, 0, device, seed=35)
    assert experts(x, w13, w2, ids, weights, impl=impl).shape == (0, TINY.hidden)


def test_experts_reject_bad_inputs() -> None:
    w13, w2 = prepared(TINY, "reference", "cpu")
    x = tokens(TINY, 3, "cpu", seed=36)
    ids, weights = routing(TINY, 3, "cpu", seed=37)
    given = {
        "x": x,
        "w13": w13,
        "w2": w2,
        "topk_ids": ids,
        "topk_weights": weights,
        "impl": "reference",
    }

    def call(**changes: object) -> None:
        experts(**(given | changes))

    with pytest.raises(InvalidInputError, match=r"experts: x must be 2-D .*, got 3-D"):
        call(x=x[None])
    with pytest.raises(InvalidInputError, match=r"w13 must be \[E, 2 I, 64\], got \(8, 128, 63\)"):
        call(w13=w13[:, :, :63])
    with pytest.raises(InvalidInputError, match=r"w2 must be \[8, 64, 64\], got \(7, 64, 64\)"):
        call(w2=w2[:7])
    with pytest.raises(InvalidInputError, match=r"w2 must be \[8, 64, 64\], got \(8, 63, 64\)"):
        call(w2=w2[:, :63].contiguous())
    with pytest.raises(InvalidInputError, match=r"w13 must be \[E, 2 I, 64\], got \(0, 128, 64\)"):
        call(w13=w13[:0], w2=w2[:0])
    with pytest.raises(InvalidInputError, match="Pass it through prepare_expert_weight"):
        call(w13=w13.bfloat16())
    with pytest.raises(InvalidInputError, match="contiguous=False"):
        call(w2=w2.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(
        InvalidInputError, match=r"topk_ids must be int32 or int64 of shape \(3, K\)"
    ):
        call(topk_ids=ids.float())
    with pytest.raises(InvalidInputError, match=r"topk_ids must be in \[-1, 8\), got .* to 8"):
        call(topk_ids=torch.full_like(ids, 8))
    with pytest.raises(InvalidInputError, match=r"topk_weights must be torch\.float32 of shape"):
        call(topk_weights=weights.bfloat16())
    with pytest.raises(InvalidInputError, match=r"topk_weights must be .* on cpu, got .* on meta"):
        call(topk_weights=weights.to("meta"))
    with pytest.raises(
        InvalidInputError, match=r"experts: shared must be torch\.bfloat16 of shape \(3, 64\)"
    ):
        call(shared=x.float())
    with pytest.raises(InvalidInputError, match="limit must be positive or None, got 0"):
        call(limit=0.0)
    with pytest.raises(UnsupportedError, match="layout 'ragged' is not supported; supported: cont"):
        call(layout="ragged")
    with pytest.raises(UnsupportedError, match="impl 'mkl' is not supported; supported: reference"):
        call(impl="mkl")
    same = torch.zeros((3, 2), dtype=torch.int32)
    with pytest.raises(InvalidInputError, match=r"at most 3 rows of one expert .*, got 6"):
        call(topk_ids=same, layout="masked")


def test_prepare_expert_weight_rounds_to_nearest_even(impl_device: tuple[str, str]) -> None:
    impl, device = impl_device
    tie = torch.tensor([[[1 + 2**-8, 1 + 3 * 2**-8, -0.0]]], device=device)
    expected = torch.tensor([[[1.0, 1 + 2**-6, -0.0]]], device=device)
    weight = prepare_expert_weight(tie, dtype=torch.bfloat16, impl=impl)
    assert_bitwise_equal(weight.float(), expected)
