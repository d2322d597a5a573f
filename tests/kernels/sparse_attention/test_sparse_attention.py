"""Relations of sparse attention: queries alone and together, tails of -1, poison, pages, fp64."""

from __future__ import annotations

import pytest
import torch
from sparse_attention_cases import PROGRAMS, SparseCase, attention_fp64, make_case, shapes_of

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.sparse_attention import (
    check_indices,
    sparse_attention,
    window_and_selected,
)
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal

TOKENS = 65
ROWS = (1, 2, 7, 8, 17, 33, 64)


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(params=["v32", "v4"])
def case(request: pytest.FixtureRequest, program: tuple[str, str]) -> SparseCase:
    shape = shapes_of(program[1])[0 if request.param == "v32" else 1]
    return make_case(tokens=TOKENS, device=program[1], **shape)


def run(case: SparseCase, impl: str, rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
    return sparse_attention(case.q[rows], case.kv, case.indices[rows], **case.keywords, impl=impl)


def test_sparse_attention_matches_reference(program: tuple[str, str], case: SparseCase) -> None:
    sinks = None if case.sinks is None else case.sinks.double()
    expected, lse = attention_fp64(
        case.q.double(), case.kv.double(), case.indices, sinks, case.scale, case.d_v
    )
    out, out_lse = run(case, program[0])
    # Scores: D terms in fp32 err by at most D 2^-24 sum|q k| scale, and P by as much relatively.
    # P is rounded to bf16 once (2^-8 of each, more where a program rounds it twice: 2^-7), its row
    # sum is not; the result is rounded once. All are relative to sum P |v| <= max |v| named.
    entries = case.kv.double()[case.indices.clamp_min(0).long()].abs()
    score = torch.einsum("thd,tkd->thk", case.q.double().abs(), entries).amax(-1) * case.scale
    noise = score * case.q.shape[2] * 2**-24 + 2**-16
    reach = entries[..., : case.d_v].amax(1).unsqueeze(1)
    bound = expected.abs() * 2**-8 + reach * (2**-7 + noise.unsqueeze(-1))
    assert bool(((out.double() - expected).abs() <= bound).all())
    seen = lse != float("-inf")
    assert bool(((out_lse.double() - lse).abs()[seen] <= (noise + lse.abs() * 2**-22)[seen]).all())
    assert bool((out_lse[~seen] == float("inf")).all())
    assert not bool(out[(~seen).any(1)].any())


def test_sparse_attention_is_batch_invariant(program: tuple[str, str], case: SparseCase) -> None:
    whole, whole_lse = run(case, program[0])
    for rows in ROWS:
        for start in {0, (TOKENS - rows) // 2, TOKENS - rows}:
            part = slice(start, start + rows)
            out, lse = run(case, program[0], part)
            assert_bitwise_equal(out, whole[part])
            assert_bitwise_equal(lse, whole_lse[part])


def test_sparse_attention_writes_pieces_of_a_result(
    program: tuple[str, str], case: SparseCase
) -> None:
    whole, whole_lse = run(case, program[0])
    out = torch.full_like(whole, 7.0)
    for part in (slice(0, 20), slice(20, 21), slice(40, TOKENS)):
        given, lse = sparse_attention(
            case.q[part], case.kv, case.indices[part], **case.keywords, out=out[part],
            impl=program[0],
        )  # fmt: skip
        assert given.data_ptr() == out[part].data_ptr()
        assert_bitwise_equal(out[part], whole[part])
        assert_bitwise_equal(lse, whole_lse[part])
    # The control: what no piece covers is as it was.
    assert bool((out[21:40] == 7.0).all())
    for wrong in (out[1:], out.float(), out.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(InvalidInputError, match="sparse_attention: out must be contiguous"):
            sparse_attention(
                case.q, case.kv, case.indices, **case.keywords, out=wrong, impl=program[0]
            )


def test_sparse_attention_ignores_a_tail_of_nothing(
    program: tuple[str, str], case: SparseCase
) -> None:
    whole, whole_lse = run(case, program[0])
    for more in (1, 63, 64, 200):
        tail = case.indices.new_full((TOKENS, more), -1)
        longer = torch.cat((case.indices, tail), dim=1)
        out, lse = sparse_attention(case.q, case.kv, longer, **case.keywords, impl=program[0])
        assert_bitwise_equal(out, whole)
        assert_bitwise_equal(lse, whole_lse)


def test_sparse_attention_entries_may_lie_anywhere(
    program: tuple[str, str], case: SparseCase
) -> None:
    """Paged = packed: the same entries in another order among rows of NaN."""
    entries = case.kv.shape[0]
    generator = torch.Generator().manual_seed(3)
    places = torch.randperm(3 * entries, generator=generator)[:entries].to(case.kv.device)
    scattered = case.kv.new_full((3 * entries, case.kv.shape[1]), float("nan"))
    scattered[places] = case.kv
    moved = torch.where(
        case.indices >= 0, places[case.indices.clamp_min(0).long()].int(), case.indices
    )
    packed = run(case, program[0])
    paged = sparse_attention(case.q, scattered, moved, **case.keywords, impl=program[0])
    for actual, expected in zip(paged, packed, strict=True):
        assert_bitwise_equal(actual, expected)


def test_sparse_attention_ignores_poisoned_queries(
    program: tuple[str, str], case: SparseCase
) -> None:
    whole, whole_lse = run(case, program[0])
    q = case.q.clone()
    q[::2] = float("nan")
    out, lse = sparse_attention(q, case.kv, case.indices, **case.keywords, impl=program[0])
    assert_bitwise_equal(out[1::2], whole[1::2])
    assert_bitwise_equal(lse[1::2], whole_lse[1::2])


def test_sparse_attention_heads_are_independent(program: tuple[str, str], case: SparseCase) -> None:
    """Fewer heads (padded by a kernel that wants 64 or 128) have the bits they have among all."""
    if program[0] == "reference":
        pytest.skip("the number of heads decides the shape of the reference's GEMM")
    whole, whole_lse = run(case, program[0])
    for heads in (1, 16, 48):
        sinks = None if case.sinks is None else case.sinks[:heads]
        out, lse = sparse_attention(
            case.q[:, :heads], case.kv, case.indices, **(case.keywords | {"sinks": sinks}),
            impl=program[0],
        )  # fmt: skip
        assert_bitwise_equal(out, whole[:, :heads].contiguous())
        assert_bitwise_equal(lse, whole_lse[:, :heads].contiguous())


def test_sparse_attention_is_run_to_run_stable(program: tuple[str, str], case: SparseCase) -> None:
    first = run(case, program[0])
    for _ in range(5):
        for actual, expected in zip(run(case, program[0]), first, strict=True):
            assert_bitwise_equal(actual, expected)


def test_sparse_attention_compiled_equals_eager(program: tuple[str, str], case: SparseCase) -> None:
    def attend(q: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return sparse_attention(q, case.kv, indices, **case.keywords, impl=program[0])[0]

    backend = "inductor" if program[1] == "cuda" else "aot_eager"
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    assert_bitwise_equal(compiled(case.q, case.indices), attend(case.q, case.indices))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("impl", ["triton", "flash_mla"])
def test_sparse_attention_graph_replay_equals_eager(impl: str) -> None:
    """A graph of 65 rows serves fewer: padded rows name nothing and hold NaN."""
    case = make_case(tokens=TOKENS, device="cuda", **shapes_of("cuda")[1])
    eager = run(case, impl)
    q, indices = torch.full_like(case.q, float("nan")), torch.full_like(case.indices, -1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sparse_attention(q, case.kv, indices, **case.keywords, impl=impl)
    q[:40], indices[:40] = case.q[:40], case.indices[:40]
    graph.replay()
    for actual, expected in zip(captured, eager, strict=True):
        assert_bitwise_equal(actual[:40], expected[:40])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashMLA needs a CUDA device")
@pytest.mark.parametrize("form", [0, 1])
def test_sparse_attention_equals_stock_prefill(form: int) -> None:
    """vLLM's own call of the kernel on the same entries: the same bits."""
    flashmla = pytest.importorskip("vllm.v1.attention.ops.flashmla")
    case = make_case(tokens=TOKENS, device="cuda", **shapes_of("cuda")[form])
    theirs = flashmla.flash_mla_sparse_fwd(
        case.q, case.kv.unsqueeze(1), case.indices.unsqueeze(1), case.scale, attn_sink=case.sinks
    )
    assert_bitwise_equal(run(case, "flash_mla")[0], theirs[0])


def test_control_another_order_of_the_entries_differs(
    program: tuple[str, str], case: SparseCase
) -> None:
    """Bits follow the order of the indices, which is why the selection fixes it."""
    whole, _ = run(case, program[0])
    turned = sparse_attention(
        case.q, case.kv, case.indices.flip(1).contiguous(), **case.keywords, impl=program[0]
    )[0]
    assert not bitwise_equal(turned, whole)


def test_control_splits_that_follow_the_batch_differ(
    program: tuple[str, str], case: SparseCase
) -> None:
    """Two halves merged by their lse, as a decode kernel with splits does, are other bits."""
    whole, whole_lse = run(case, program[0])
    middle = case.indices.shape[1] // 2
    keywords = case.keywords | {"sinks": None}
    parts = [
        sparse_attention(case.q, case.kv, half.contiguous(), **keywords, impl=program[0])
        for half in (case.indices[:, :middle], case.indices[:, middle:])
    ]
    sums = [torch.where(part[1] == float("inf"), float("-inf"), part[1]) for part in parts]
    lse = torch.logaddexp(*sums)
    weights = [(part - lse).exp().nan_to_num(0.0).unsqueeze(-1) for part in sums]
    merged = parts[0][0].float() * weights[0] + parts[1][0].float() * weights[1]
    if case.sinks is not None:
        merged = merged * torch.sigmoid(lse - case.sinks).unsqueeze(-1)
    assert not bitwise_equal(merged.to(whole.dtype), whole)
    assert not bitwise_equal(lse, whole_lse)


def test_window_and_selected_names_rows_in_order() -> None:
    positions = torch.tensor([0, 2, 9])
    indices = window_and_selected(
        positions,
        window=4,
        window_base=torch.tensor([100, 100, 200]),
        selected=torch.tensor([[-1, -1], [0, -1], [1, 0]]),
        selected_base=torch.tensor([10, 10, 20]),
        multiple=8,
    )
    assert indices.dtype == torch.int32
    assert indices.tolist() == [
        [100, -1, -1, -1, -1, -1, -1, -1],
        [100, 101, 102, -1, 10, -1, -1, -1],
        [206, 207, 208, 209, 21, 20, -1, -1],
    ]


def test_window_and_selected_is_phase_invariant() -> None:
    """A query's row is the same alone and among others."""
    positions = torch.arange(50)
    base = torch.full((50,), 7)
    whole = window_and_selected(positions, window=16, window_base=base)
    for t in (0, 3, 15, 16, 49):
        one = slice(t, t + 1)
        alone = window_and_selected(positions[one], window=16, window_base=base[one])
        assert_bitwise_equal(alone, whole[one])


def test_sparse_attention_rejects_bad_inputs() -> None:
    case = make_case(tokens=3, **shapes_of("cpu")[1])
    q, kv, indices = case.arguments
    keywords = case.keywords | {"impl": "reference"}
    beyond = indices.clone()
    beyond[2, 5] = kv.shape[0]
    with pytest.raises(InvalidInputError, match=r"indices\[2, 5\] must be -1 or a row of kv below"):
        sparse_attention(q, kv, beyond, **keywords)
    with pytest.raises(InvalidInputError, match=r"indices\[0, 0\] must be .* got -2"):
        check_indices(torch.tensor([[-2]], dtype=torch.int32), 4)
    with pytest.raises(InvalidInputError, match=r"indices must be int32 \[3, K\], got torch.int64"):
        sparse_attention(q, kv, indices.long(), **keywords)
    with pytest.raises(InvalidInputError, match=r"kv must be torch.bfloat16 \[S, 64\]"):
        sparse_attention(q, kv[:, :63], indices, **keywords)
    with pytest.raises(InvalidInputError, match=r"sinks must be float32 \[4\]"):
        sparse_attention(q, kv, indices, **(keywords | {"sinks": torch.ones(3)}))
    with pytest.raises(InvalidInputError, match="d_v must be between 1 and 64, got 65"):
        sparse_attention(q, kv, indices, **(keywords | {"d_v": 65}))
    with pytest.raises(UnsupportedError, match="width 64 with d_v 64 by impl 'flash_mla'"):
        sparse_attention(q, kv, indices, **(keywords | {"impl": "flash_mla"}))
    with pytest.raises(UnsupportedError, match="width 60 with d_v 60 by impl 'triton'"):
        sparse_attention(
            q[..., :60], kv[:, :60], indices, **(keywords | {"impl": "triton", "d_v": 60})
        )
    with pytest.raises(UnsupportedError, match="impl 'cuda' is not supported"):
        sparse_attention(q, kv, indices, **(keywords | {"impl": "cuda"}))
    with pytest.raises(InvalidInputError, match="selected_base must be given"):
        window_and_selected(
            torch.tensor([1]), window=2, window_base=torch.tensor([0]), selected=indices[:1]
        )
