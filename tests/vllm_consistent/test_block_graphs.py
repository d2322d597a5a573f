"""Sparse blocks under torch.compile: no float op but ours in the engine's graph; the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_cases import BlockCase

from consistent_kernels.blocks import BlockOps
from consistent_kernels.testing import assert_bitwise_equal
from train_bridge.blocks import PackedSequences
from vllm_consistent.graph_check import foreign_float_ops

NAMES = ("v32", "v4-window", "v4-csa", "v4-hca", "v32-fp8", "v4-csa-fp8")
LENGTHS = [20, 3]


def graph_of(case: BlockCase) -> tuple[torch.fx.GraphModule, torch.Tensor]:
    """Trace one step of the engine's block in one piece; return its graph and its output."""
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    engine = case.engine(LENGTHS)
    hidden = case.hidden(sum(LENGTHS))
    engine.block.forward = torch.compile(engine.block.forward, backend=backend, fullgraph=True)
    sequences = PackedSequences.from_lengths(LENGTHS)
    out = engine.run(hidden, sequences, [[(0, 0, 20), (1, 0, 3)]])
    torch._dynamo.reset()
    (graph,) = seen
    return graph, out


@pytest.mark.parametrize("name", NAMES)
def test_block_graph_holds_no_foreign_float_op(name: str) -> None:
    case = BlockCase.make(name, "cpu")
    graph, out = graph_of(case)
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert any("consistent_kernels.sparse_attention" in name for name in names)
    assert foreign_float_ops(graph) == []
    with torch.no_grad():
        expected = case.trainer()(case.hidden(sum(LENGTHS)), PackedSequences.from_lengths(LENGTHS))
    assert_bitwise_equal(out, expected)


def test_control_a_norm_outside_an_op_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(self: BlockOps, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)

    monkeypatch.setattr(BlockOps, "layer_norm", plain)
    case = BlockCase.make("v32", "cpu")
    engine = case.engine(LENGTHS)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.extend(foreign_float_ops(graph))
        return graph.forward

    batch = engine.static_batch(2)
    torch.compile(engine.block.forward, backend=backend, fullgraph=True)(
        case.hidden(2), batch.batch
    )
    torch._dynamo.reset()
    assert any("layer_norm" in name for name in seen)


@pytest.mark.parametrize("name", ["v32", "v4-csa"])
def test_block_trainer_compiled_equals_eager(name: str) -> None:
    """A trainer's forward is left as it is, gradients included."""
    case = BlockCase.make(name, "cpu")
    sequences = PackedSequences.from_lengths(LENGTHS)
    results = []
    for wrap in (lambda block: block, torch.compile):
        hidden = case.hidden(sum(LENGTHS)).requires_grad_()
        block = case.trainer()
        out = wrap(block)(hidden, sequences)
        out.float().square().sum().backward()
        results.append((out.detach(), hidden.grad, block.q_a.grad))
    torch._dynamo.reset()
    for compiled, eager in zip(*reversed(results), strict=True):
        assert_bitwise_equal(compiled, eager)
