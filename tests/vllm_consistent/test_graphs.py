"""Which of the two full graphs a step replays, and what is captured for each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

cudagraph_utils = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")

from vllm.config.compilation import CUDAGraphMode  # noqa: E402

from consistent_kernels.errors import UnsupportedError  # noqa: E402
from vllm_consistent.attention.backend import ConsistentMetadataBuilder  # noqa: E402
from vllm_consistent.runner.graphs import adopt_graphs  # noqa: E402

SPLIT = 4096


class Graph:
    """Stands for a captured graph; knows for how many keys."""

    def __init__(self, keys: int, replayed: list[int]) -> None:
        self.keys, self.replayed = keys, replayed

    def replay(self) -> None:
        self.replayed.append(self.keys)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(mode, keys) of every capture that vLLM's manager makes."""
    made: list[tuple[str, int]] = []

    def capture(self: Any, model: Any, model_state: Any) -> str:
        for mode, descs in self._capture_descs.items():
            for desc in descs:
                made.append((mode.name, model_state.max_model_len))
                if mode == CUDAGraphMode.FULL:
                    assert desc not in self.graphs
                    self.graphs[desc] = Graph(model_state.max_model_len, self.replayed)
        return "states"

    monkeypatch.setattr(cudagraph_utils.ModelCudaGraphManager, "capture", capture)
    return made


def adopted(desc: Any) -> tuple[Any, ConsistentMetadataBuilder]:
    manager = object.__new__(cudagraph_utils.ModelCudaGraphManager)
    manager.graphs, manager.replayed = {}, []
    manager._capture_descs = {CUDAGraphMode.PIECEWISE: ["piece"], CUDAGraphMode.FULL: [desc]}
    manager.is_last_pp_rank, manager.use_aux_hidden_state_outputs = True, False
    manager.hidden_states = torch.arange(8.0)
    builder = object.__new__(ConsistentMetadataBuilder)
    other = SimpleNamespace()  # a group of another kind of layers
    groups = [[SimpleNamespace(get_metadata_builder=lambda b=b: b)] for b in (builder, other)]
    adopt_graphs(SimpleNamespace(cudagraph_manager=manager, attn_groups=groups), SPLIT)
    return manager, builder


def full_desc() -> Any:
    return cudagraph_utils.BatchExecutionDescriptor(CUDAGraphMode.FULL, 4, 4)


def test_full_graphs_are_captured_for_both_lengths(captures: list[tuple[str, int]]) -> None:
    desc = full_desc()
    manager, builder = adopted(desc)
    state = SimpleNamespace(max_model_len=40_960)
    assert manager.capture(None, state) == "states"
    assert captures == [("PIECEWISE", 40_960), ("FULL", 40_960), ("FULL", SPLIT)]
    assert state.max_model_len == 40_960
    for longest in (17, SPLIT, SPLIT + 1, 40_960, 1):
        builder.longest = longest
        assert manager.run_fullgraph(desc).tolist() == [0, 1, 2, 3]
    assert manager.replayed == [SPLIT, SPLIT, 40_960, 40_960, SPLIT]


def test_a_short_model_has_one_kind(captures: list[tuple[str, int]]) -> None:
    desc = full_desc()
    manager, builder = adopted(desc)
    manager.capture(None, SimpleNamespace(max_model_len=SPLIT))
    assert captures == [("PIECEWISE", SPLIT), ("FULL", SPLIT)]
    builder.longest = 9
    manager.run_fullgraph(desc)
    assert manager.replayed == [SPLIT]


def test_a_failed_capture_leaves_vllms_graphs(captures: list[tuple[str, int]]) -> None:
    desc = full_desc()
    manager, _ = adopted(desc)
    state = SimpleNamespace(max_model_len=40_960)
    manager._capture_descs[CUDAGraphMode.FULL] = [desc, desc]
    with pytest.raises(AssertionError):
        manager.capture(None, state)
    assert state.max_model_len == 40_960
    assert set(manager._capture_descs) == {CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL}


def test_rejects_another_manager() -> None:
    with pytest.raises(UnsupportedError, match="CUDA graphs: SimpleNamespace is not supported"):
        adopt_graphs(SimpleNamespace(cudagraph_manager=SimpleNamespace(), attn_groups=[]), SPLIT)
    adopt_graphs(SimpleNamespace(cudagraph_manager=None, attn_groups=[]), SPLIT)
