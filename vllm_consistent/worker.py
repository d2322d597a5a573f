"""What a worker that serves a contract does on any device, and the calls others make on it.

The configuration hook selects the worker class of the device (in `worker_cpu.py`, `worker_cuda.py`)
and the extension. Importing this module registers our layers, in the worker only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from consistent_kernels import counters
from consistent_kernels.contract import check_same
from consistent_kernels.errors import ConfigurationError
from consistent_kernels.model_facts import model_facts
from consistent_kernels.resolve import resolve_contract
from vllm_consistent import env
from vllm_consistent.contracts import attached
from vllm_consistent.layers.qk_norm import fuse_qk_norm
from vllm_consistent.layers.registry import register_layers
from vllm_consistent.reporting import build_receipt, build_report
from vllm_consistent.weights.checkpoint import check_checkpoint
from vllm_consistent.weights.names import hf_views
from vllm_consistent.weights.served import ServedWeights, read_safetensors

register_layers()


class ConsistencyWorkerExtension:
    """Mixed into the worker by vLLM; call by name through `collective_rpc`.

    Another extension class must derive from this one.
    """

    def consistency_report(self) -> dict[str, Any]:
        """Return what this worker really serves, as plain types (see `reporting.build_report`)."""
        return build_report(self)

    def update_weights_in_place(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None = None,
        path: str | None = None,
        version: int | None = None,
        finish: bool = True,
    ) -> dict[str, Any]:
        """Load weights by Hugging Face name and return a receipt; see `ServedWeights.update`.

        Reset the prefix cache afterwards: a request that would read older pages is refused.

        Args:
            weights: named tensors (an engine in the caller's process, or a small model).
            path: a .safetensors file or folder instead.
            version: the trainer's counter.
            finish: False when more buckets of the same update follow.
        """
        if (weights is None) == (path is None):
            raise ConfigurationError(["pass either weights or path"], "weight update")
        named = read_safetensors(path) if path is not None else weights
        pairs = named.items() if isinstance(named, Mapping) else named
        self.served_weights.update(pairs, version, finish)
        return self.weight_receipt() if finish else {}

    def serve_loaded_weights(self, version: int | None = None) -> dict[str, Any]:
        """Serve weights that were loaded through `model.load_weights`; return a receipt."""
        self.served_weights.finish(version)
        return self.weight_receipt()

    def stale_reason(self) -> str | None:
        """Return why rollouts are refused now, or None."""
        return self.served_weights.stale

    def weight_receipt(self) -> dict[str, Any]:
        """Return version and digests of the weights served, by Hugging Face name.

        Raises:
            StaleWeightsError: weights are stale, or a derived weight does not follow its source.
        """
        return build_receipt(self.served_weights, attached(self.vllm_config))


class ConsistentWorkerMixin:
    served_weights: ServedWeights
    requested: bool
    calls_before: dict[str, dict[str, int]]

    def load_model(self, **kwargs: Any) -> None:
        self.requested = env.enabled()
        self.calls_before = counters.snapshot()
        self._check_contract()
        super().load_model(**kwargs)
        self._adopt_runner()
        model = self.model_runner.get_model()
        fuse_qk_norm(model)
        tied = bool(self.model_config.hf_text_config.tie_word_embeddings)
        # First: what a missing weight's memory holds may be NaN, which would be named instead.
        check_checkpoint(self.vllm_config, hf_views(model))
        self.served_weights = ServedWeights(model, tied, attached(self.vllm_config))
        self._prepare_kernels(model)

    def execute_model(self, scheduler_output: Any) -> Any:
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self.served_weights.check_step(scheduler_output, block_sizes)
        return super().execute_model(scheduler_output)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.served_weights.mark_stale("weights are being reloaded")
        super().reload_weights(*args, **kwargs)
        self.served_weights.finish(None)

    def _check_contract(self) -> None:
        # The front end resolved a contract; this process must hold the same sources and tools.
        asked = attached(self.vllm_config)
        if asked is None:
            raise ConfigurationError(
                ["the front end attached no contract; set VLLM_CONSISTENT=1 there too"], "worker"
            )
        model = self.model_config
        dtype = str(model.dtype).removeprefix("torch.")
        facts = model_facts(model.hf_text_config, dtype, architecture=model.architecture)
        ours = resolve_contract(facts, self.device_config.device_type, like=asked)
        check_same(ours, asked, ours_is="the worker", theirs_is="the front end")

    def _adopt_runner(self) -> None:
        raise AssertionError("the device's worker class decides")

    def _prepare_kernels(self, model: torch.nn.Module) -> None:
        """What a device compiles or probes before its first step; nothing by default."""
