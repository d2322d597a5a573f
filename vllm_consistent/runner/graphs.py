"""Full CUDA graphs of two kinds: for steps whose keys fit into one key split, and for all others.

A captured attention launches as many key splits as the longest sequence that its graph must serve
has. vLLM captures for max_model_len, so under a large one even short contexts would pay for splits
that no request fills (docs/performance.md). The bits are the same: an empty split adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from consistent_kernels.errors import UnsupportedError
from vllm_consistent.attention.backend import ConsistentMetadataBuilder


def adopt_graphs(runner: Any, key_split: int) -> None:
    """Capture both kinds from now on; `runner` is a V2 runner that has not captured yet.

    Args:
        runner: its `cudagraph_manager` keeps its sizes; only what it captures and replays changes.
        key_split: keys of a split, `AttentionParameters.key_split`.
    """
    manager = runner.cudagraph_manager
    if manager is None:
        return
    if type(manager) is not ModelCudaGraphManager:
        raise UnsupportedError(
            "CUDA graphs", type(manager).__name__, [ModelCudaGraphManager.__name__]
        )
    manager.__class__ = TwoLengthsGraphManager
    manager.key_split = key_split
    manager.short_graphs = {}
    builders = [group.get_metadata_builder() for groups in runner.attn_groups for group in groups]
    manager.builders = [b for b in builders if isinstance(b, ConsistentMetadataBuilder)]


class TwoLengthsGraphManager(ModelCudaGraphManager):
    """Replays the short graph where the step's longest sequence fits into one key split."""

    key_split: int
    short_graphs: dict[Any, Any]
    builders: Sequence[ConsistentMetadataBuilder]

    def capture(self, model: Any, model_state: Any, *args: Any, **kwargs: Any) -> Any:
        """Capture as vLLM, then the full graphs once more for `key_split` keys."""
        states = super().capture(model, model_state, *args, **kwargs)
        longest = model_state.max_model_len
        full = self._capture_descs.get(CUDAGraphMode.FULL)
        if not full or longest <= self.key_split:
            return states
        wanted, long_graphs = self._capture_descs, self.graphs
        self._capture_descs, self.graphs = {CUDAGraphMode.FULL: full}, {}
        # Read for captures alone; steps take their own lengths.
        model_state.max_model_len = self.key_split
        try:
            super().capture(model, model_state, *args, **kwargs)
            self.short_graphs = self.graphs
        finally:
            model_state.max_model_len = longest
            self._capture_descs, self.graphs = wanted, long_graphs
        return states

    def run_fullgraph(self, desc: Any) -> Any:
        """Replay the graph that this step's metadata asks for."""
        longest = max(builder.longest for builder in self.builders)
        if desc not in self.short_graphs or longest > self.key_split:
            return super().run_fullgraph(desc)
        long_graphs, self.graphs = self.graphs, self.short_graphs
        try:
            return super().run_fullgraph(desc)
        finally:
            self.graphs = long_graphs
