"""What the trainer says of itself: requested, installed and served."""

from __future__ import annotations

from collections import Counter
from importlib import metadata

from torch import nn

from consistent_kernels import counters
from consistent_kernels.binaries import served_binaries
from consistent_kernels.protocol.report import ConsistencyReport, environment_facts
from train_bridge.classes import UNUSED
from train_bridge.hf import bridge_state
from train_bridge.modules import Bridged, unwrapped

_PACKAGES = ("torch", "triton", "transformers", "vllm-consistent")


def consistency_report(model: nn.Module) -> ConsistencyReport:
    """Return the trainer's account, to be checked against the workers' (`protocol.check_reports`).

    Args:
        model: bridged.

    Raises:
        ConfigurationError: the model is not bridged.
    """
    state = bridge_state(model)
    inner = unwrapped(model)
    layers: Counter[str] = Counter()
    attention, foreign = {}, []
    head = None
    for name, module in inner.named_modules():
        kind = type(module)
        serves = module.serves if isinstance(module, Bridged) else ""
        if isinstance(module, Bridged):
            layers[_our_class(kind).__qualname__] += 1
        elif not isinstance(module, UNUSED + inner.containers):
            foreign.append(f"{name}: {kind.__name__}")
        if "forward" in vars(module):
            foreign.append(f"{name}: its forward was replaced")
        if serves == "attention":
            attention[name] = f"{kind.__module__}.{_our_class(kind).__qualname__}"
        if serves == "head":
            head = f"{_our_class(kind).__module__}.{_our_class(kind).__qualname__}"
    return ConsistencyReport(
        role="trainer",
        requested=True,
        registered=True,
        contract=state.contract.to_dict(),
        digest=state.contract.digest,
        runner="train_bridge",
        sampler=head,
        device=state.device_type,
        layers=dict(layers),
        attention=attention,
        foreign_layers=foreign,
        calls=counters.snapshot(),
        packages=_versions(),
        binaries=served_binaries(),
        environment=environment_facts(state.device_type),
        weight_version=state.version.value,
    )


def _our_class(kind: type) -> type:
    # FSDP2 derives one more class from ours.
    return next(base for base in kind.__mro__ if base.__module__.startswith("train_bridge."))


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
