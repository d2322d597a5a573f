"""Attention blocks of DeepSeek-V3.2 and V4: the engine's form = the trainer's form, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from block_cases import BLOCKS, PROGRAMS, BlockCase, chunked, prefill_then_decode

from consistent_kernels.errors import InvalidInputError, UnsupportedError
from consistent_kernels.testing import assert_bitwise_equal, bitwise_equal
from train_bridge.blocks import PackedSequences, ops

LENGTHS = {"cpu": [3, 70, 40], "hca": [3, 131, 40], "cuda": [3, 2200, 40, 700, 129]}
"""Contexts below and above top-k, around the window and around whole windows of the compressor."""


@pytest.fixture(params=PROGRAMS)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=BLOCKS)
def case(request: pytest.FixtureRequest, device: str) -> BlockCase:
    return BlockCase.make(request.param, device)


@pytest.fixture(params=["v32", "v4-csa"])
def selecting(request: pytest.FixtureRequest, device: str) -> BlockCase:
    """The blocks with an indexer: those with the most that could depend on the batch."""
    return BlockCase.make(request.param, device)


def trained(
    case: BlockCase, lengths: list[int], hidden: torch.Tensor
) -> tuple[torch.Tensor, PackedSequences]:
    sequences = PackedSequences.from_lengths(lengths, case.device)
    with torch.no_grad():
        return case.trainer()(hidden, sequences), sequences


def test_block_train_equals_infer(case: BlockCase, device: str) -> None:
    """One prefill, chunks that differ by request, and decode behind a prefill; padded rows."""
    short = "hca" if case.name == "v4-hca" else "cpu"
    lengths = LENGTHS[device if device == "cuda" else short]
    hidden = case.hidden(sum(lengths))
    expected, sequences = trained(case, lengths, hidden)
    assert bool(expected.isfinite().all())
    plans = {
        "prefill": [[(i, 0, n) for i, n in enumerate(lengths)]],
        "chunks": chunked(lengths, (2, 37, 16) if device == "cpu" else (2, 517, 16, 333)),
        "decode": prefill_then_decode(lengths, 9),
    }
    for name, plan in plans.items():
        out = case.engine(lengths).run(hidden, sequences, plan, padding=3)
        assert_bitwise_equal(out, expected, name)


def test_block_token_by_token_equals_train(case: BlockCase, device: str) -> None:
    lengths = [21] if device == "cpu" else [150]
    hidden = case.hidden(sum(lengths), seed=1)
    expected, sequences = trained(case, lengths, hidden)
    plan = [[(0, t, t + 1)] for t in range(lengths[0])]
    assert_bitwise_equal(case.engine(lengths).run(hidden, sequences, plan), expected)


def test_block_64_requests_equal_each_alone(case: BlockCase, device: str) -> None:
    lengths = [1 + i % 5 + (30 if i % 32 == 5 else 0) for i in range(64)]
    hidden = case.hidden(sum(lengths), seed=2)
    expected, sequences = trained(case, lengths, hidden)
    together = case.engine(lengths).run(hidden, sequences, prefill_then_decode(lengths, 3))
    assert_bitwise_equal(together, expected)
    for request in (0, 5, 63):
        rows = slice(int(sequences.cu_seqlens[request]), int(sequences.cu_seqlens[request + 1]))
        alone, _ = trained(case, [lengths[request]], hidden[rows])
        assert_bitwise_equal(alone, expected[rows])


def test_block_packing_moves_no_bit(case: BlockCase, device: str) -> None:
    lengths = [19, 64, 5]
    hidden = case.hidden(sum(lengths), seed=3)
    whole, sequences = trained(case, lengths, hidden)
    parts = hidden.split(lengths)
    turned, _ = trained(case, lengths[::-1], torch.cat(parts[::-1]))
    for ours, theirs in zip(whole.split(lengths), turned.split(lengths[::-1])[::-1], strict=True):
        assert_bitwise_equal(ours, theirs)
    assert int(sequences.cu_seqlens[-1]) == sum(lengths)


def test_block_workspace_is_sized_once(case: BlockCase, device: str) -> None:
    """A step of more queries than the workspace holds goes in pieces: the same bits and storage."""
    lengths = [40, 3, 9]
    hidden = case.hidden(sum(lengths), seed=8)
    expected, sequences = trained(case, lengths, hidden)
    engine = case.engine(lengths, queries=5)
    workspace, seen = engine.block.workspace, []
    if case.programs.read == "fp8":
        assert workspace is None
    else:
        before = workspace.rows.data_ptr()
        bounds = workspace.bounds
        assert workspace.rows.nbytes == 5 * bounds.k * bounds.layout.width * 2
        attend = engine.block.ops.sparse_attention

        def watched(q: torch.Tensor, rows: torch.Tensor, *rest: object) -> torch.Tensor:
            seen.append((rows.data_ptr(), len(q)))
            return attend(q, rows, *rest)

        engine.block.ops.sparse_attention = watched
    plan = chunked(lengths, (2, 11, 16)) if device == "cpu" else prefill_then_decode(lengths, 2)
    assert_bitwise_equal(engine.run(hidden, sequences, plan, padding=1), expected)
    if workspace is not None:
        assert {place for place, _ in seen} == {before}
        assert max(count for _, count in seen) == 5
        assert len(seen) > len(plan)


def test_block_rejects_a_batch_beyond_its_bounds() -> None:
    case = BlockCase.make("v4-hca", "cpu")
    engine = case.engine([20])
    batch = engine.static_batch(2).batch
    hidden = case.hidden(2)
    with pytest.raises(InvalidInputError, match="PagedV4Attention: max_seq_len must be at most 20"):
        engine.block.forward(hidden, dataclasses.replace(batch, max_seq_len=21))
    with pytest.raises(InvalidInputError, match=r"requests must be int32 or int64 of shape \(2,\)"):
        engine.block.forward(hidden, dataclasses.replace(batch, requests=batch.requests[:1]))
    with pytest.raises(InvalidInputError, match="slots must be int32 or int64 of shape"):
        engine.block.forward(hidden, dataclasses.replace(batch, slots=batch.slots.float()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("name", BLOCKS)
def test_block_graph_replay_equals_eager(name: str) -> None:
    """One full graph of 8 rows serves decode steps of fewer requests; padded rows hold NaN."""
    case = BlockCase.make(name, "cuda")
    lengths = [300, 40, 129]
    hidden = case.hidden(sum(lengths), seed=7)
    expected, sequences = trained(case, lengths, hidden)
    engine = case.engine(lengths)
    prefill = [[(i, 0, n - 4) for i, n in enumerate(lengths)]]
    engine.run(hidden, sequences, prefill)
    static = engine.static_batch(8)
    engine.warm_up(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = engine.block.forward(static.hidden, static.batch)
    for back in (4, 3, 2, 1):
        rows = sequences.cu_seqlens[1:] - back
        static.fill(engine, hidden[rows], sequences.positions[rows])
        graph.replay()
        assert_bitwise_equal(captured[:3], expected[rows], f"{back} before the end")


def test_control_a_trainer_without_the_fp8_cache_differs(selecting: BlockCase, device: str) -> None:
    case = selecting
    lengths = [33]
    hidden = case.hidden(33, seed=4)
    expected, _ = trained(case, lengths, hidden)
    programs = dataclasses.replace(case.programs, read="workspace")
    case = dataclasses.replace(case, programs=programs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_kv_cache_fp8", lambda kv, layout, impl: kv)
        other, _ = trained(case, lengths, hidden)
    assert not bitwise_equal(other, expected)


def test_control_one_selected_entry_less_differs() -> None:
    """The selection reaches the output: a trainer that drops its last entry has other bits."""
    case = BlockCase.make("v32", "cpu")
    hidden = case.hidden(70, seed=5)
    expected, _ = trained(case, [70], hidden)
    params = dataclasses.replace(case.params, topk=case.params.topk - 1)
    other, _ = trained(dataclasses.replace(case, params=params), [70], hidden)
    assert not bitwise_equal(other[params.topk :], expected[params.topk :])
    assert_bitwise_equal(other[: params.topk], expected[: params.topk])


def test_block_gradients_reach_every_master(case: BlockCase, device: str) -> None:
    lengths = [9, 140]
    hidden = case.hidden(149, seed=6).requires_grad_()
    block = case.trainer()
    out = block(hidden, PackedSequences.from_lengths(lengths, device))
    out.float().square().sum().backward()
    assert bool(hidden.grad.isfinite().all())
    for name, master in block.named_parameters():
        assert not name.startswith("index_")
        assert master.grad is not None, name
        assert master.grad.dtype == torch.float32
        assert bool(master.grad.isfinite().all()), name
        assert bool(master.grad.abs().sum() > 0), name


@pytest.mark.parametrize("name", ["v32", "v4-csa"])
def test_block_reload_reaches_one_block_alone(name: str) -> None:
    """Actor and reference made of one dict of weights, the indexer's among them."""
    case = BlockCase.make(name, "cpu")
    before = {key: value.clone() for key, value in case.weights.items()}
    actor, reference = case.trainer(), case.trainer()
    hidden, sequences = case.hidden(70, seed=9), PackedSequences.from_lengths([70])
    expected = reference(hidden, sequences)
    changed = {key: value.flip(0) for key, value in actor.state_dict().items()}
    actor.load_state_dict(changed)
    assert_bitwise_equal(reference(hidden, sequences), expected)
    for key, value in case.weights.items():
        assert_bitwise_equal(value, before[key], key)
    again = case.trainer()
    again.load_state_dict(changed)
    updated = actor(hidden, sequences)
    assert_bitwise_equal(again(hidden, sequences), updated)
    assert not bitwise_equal(updated, expected)


def test_block_rejects_bad_weights() -> None:
    case = BlockCase.make("v32", "cpu")
    case.weights["q_b"] = case.weights["q_b"][:-1]
    with pytest.raises(InvalidInputError, match=r"weight 'q_b' must be \(160, 32\), got \(159"):
        case.engine([3])
    del case.weights["q_b"]
    with pytest.raises(InvalidInputError, match=r"weight 'q_b' must be \(160, 32\), got absent"):
        case.engine([3])
    csa = BlockCase.make("v4-csa", "cpu").params
    with pytest.raises(UnsupportedError, match="ratio 8 is not supported; supported: 1, 4, 128"):
        dataclasses.replace(csa, ratio=8)
