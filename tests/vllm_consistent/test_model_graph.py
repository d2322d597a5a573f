"""The whole model, as vLLM's compiler would see it, holds no floating-point operator but ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES

from vllm_consistent.graph_check import foreign_float_ops

pytestmark = pytest.mark.engine


def graphs_of(engine: Any) -> list[torch.fx.GraphModule]:
    """Trace the model's forward with Dynamo in one piece and return the graphs."""
    from vllm.forward_context import set_forward_context

    vllm_config = engine.llm.llm_engine.vllm_config
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model().model
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    ids, positions = torch.arange(5, 12), torch.arange(7)
    forward = torch.compile(type(model).forward, backend=backend, fullgraph=True)
    with torch.no_grad(), set_forward_context(None, vllm_config, slot_mapping={}):
        forward(model, ids, positions, None)
    torch._dynamo.reset()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_model_graph_holds_no_foreign_float_op(family: str, engines: Callable[..., Any]) -> None:
    graphs = graphs_of(engines(family))
    assert len(graphs) == 1
    names = {str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"}
    assert any("consistent_kernels.linear" in name for name in names)
    assert any("unified_attention_with_output" in name for name in names)
    assert foreign_float_ops(graphs[0]) == []


def test_control_a_stock_norm_is_found(
    engines: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_consistent.layers.layernorm import ConsistentRMSNorm

    def stock_like(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        y = total * self.weight
        return y if residual is None else (y, total)

    monkeypatch.setattr(ConsistentRMSNorm, "forward", stock_like)
    found = foreign_float_ops(graphs_of(engines("qwen3"))[0])
    assert any("add" in name for name in found)
    assert any("mul" in name for name in found)
