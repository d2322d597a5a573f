"""What a process says of itself (requested = installed = served); comparison of processes."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from consistent_kernels.contract import contract_from_dict
from consistent_kernels.contract import differences as contract_differences
from consistent_kernels.errors import ContractMismatchError, invalid

_COUNTED_AS = {
    "attention": ("attention_varlen", "attention_paged"),
    "fp8_linear": ("fp8_gemm",),
    "quantization": ("quantize_rows", "quantize_blocks"),
    "rms_norm": ("rms_norm", "add_rms_norm"),
}
"""Ops of a contract whose calls are counted under other names (see `counters`)."""

_MAY_DIFFER = ("environment.threads", "environment.host")
"""What two processes may have differently: every relation holds at any thread count."""


@dataclasses.dataclass(frozen=True)
class ConsistencyReport:
    """One process's account of itself, in plain types.

    Attributes:
        role: "trainer", or what names the worker.
        requested: whether consistency was asked for in this process.
        registered: whether the plugin or the bridge is installed.
        contract: `Contract.to_dict()` of what is installed, or None.
        digest: its digest.
        runner: model runner: "V1", "V2", or the trainer's.
        sampler: class that computes log-probs, with its module.
        device: "cpu" or "cuda".
        layers: our installed classes and how many of each.
        attention: backend of each attention layer.
        foreign_layers: layers that compute outside the contract.
        calls: live counters, {op: {implementation: calls}}.
        patches: {replaced function of another package: why}.
        packages: versions.
        binaries: SHA-256 of libraries and compiled kernels that served.
        environment: threads, CPU capability, device name: see `environment_facts`.
        weight_version: version of the weights that are served.
        stale: why these may not be served, or None.
    """

    role: str
    requested: bool
    registered: bool
    contract: Mapping[str, Any] | None
    digest: str | None
    runner: str
    device: str
    sampler: str | None = None
    layers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    attention: Mapping[str, str] = dataclasses.field(default_factory=dict)
    foreign_layers: Sequence[str] = ()
    calls: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    patches: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    binaries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str | int] = dataclasses.field(default_factory=dict)
    weight_version: int | None = None
    stale: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "foreign_layers", tuple(self.foreign_layers))

    def to_dict(self) -> dict[str, Any]:
        """Return plain types."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return data | {"foreign_layers": list(self.foreign_layers)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], role: str | None = None) -> ConsistencyReport:
        """Rebuild from `to_dict()`; `role` names a report without one.

        Raises:
            InvalidInputError: a missing or unknown key: the two sides are of different versions.
        """
        given = dict(data)
        if role is not None:
            given.setdefault("role", role)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        required = {name for name, f in fields.items() if _is_required(f)}
        wrong = sorted((required - given.keys()) | (given.keys() - fields.keys()))
        if wrong:
            raise invalid(
                "ConsistencyReport",
                "keys",
                f"{sorted(required)} and optional ones",
                f"missing or unknown {wrong}",
                "Install the same version of this project on both sides",
            )
        return cls(**given)

    def problems(self, *, served: bool = False) -> list[str]:
        """Return what is wrong in this process alone: requested, installed, served.

        Args:
            served: whether requests or a training forward ran since start-up: then every op of the
                contract must have been called.
        """
        found = []
        if not self.requested:
            found.append("consistency was not requested")
        if not self.registered:
            found.append("plugin or bridge is not installed")
        if self.contract is None or self.digest is None:
            return [*found, "no contract is installed"]
        contract = contract_from_dict(self.contract)
        if contract.digest != self.digest:
            found.append(f"digest {self.digest[:16]} is not its contract's {contract.digest[:16]}")
        found.extend(f"layer outside the contract: {name}" for name in self.foreign_layers)
        if self.stale:
            found.append(f"weights are stale: {self.stale}")
        for op in contract.programs:
            chosen = contract.implementation(op)
            calls = _calls_of(self.calls, op)
            other = {impl: n for impl, n in calls.items() if impl != chosen and n}
            if other:
                found.append(f"{op} was served by {other}, the contract says {chosen!r}")
            if served and not calls.get(chosen):
                found.append(f"{op} was never called: something else computes it")
        return found


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _calls_of(calls: Mapping[str, Mapping[str, int]], op: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for name in _COUNTED_AS.get(op, (op,)):
        for impl, number in calls.get(name, {}).items():
            total[impl] = total.get(impl, 0) + number
    return total


def environment_facts(device_type: str) -> dict[str, str | int]:
    """Return threads, instruction set and device of this process, for `environment`."""
    facts: dict[str, str | int] = {
        "host": platform.node(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device_type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
    return facts


def _leaves(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat.update(_leaves(item, f"{path}.{key}"))
        return flat
    if isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str)):
        return {path: list(value)}
    return {path: value}


def _comparable(report: ConsistencyReport) -> dict[str, Any]:
    """Flat facts. Calls count by who served them; how often is no difference."""
    flat: dict[str, Any] = {}
    for name, value in report.to_dict().items():
        if name in ("role", "contract", "digest"):
            continue
        if name == "calls":
            value = {op: sorted(k for k, n in impls.items() if n) for op, impls in value.items()}
        flat.update(_leaves(value, name))
    return flat


def _contract_lines(a: ConsistencyReport, b: ConsistencyReport) -> list[str]:
    if a.digest == b.digest and a.contract == b.contract:
        return []
    if a.contract is None or b.contract is None:
        present = [report.digest[:16] if report.digest else "absent" for report in (a, b)]
        return [f"contract: {present[0]} != {present[1]}"]
    lines = contract_differences(contract_from_dict(a.contract), contract_from_dict(b.contract))
    return [f"contract.{line}" for line in lines] or [f"digest: {a.digest} != {b.digest}"]


def differences(a: ConsistencyReport, b: ConsistencyReport) -> list[str]:
    """Return one line per difference, "key: a != b": contracts leaf by leaf, then all other facts.

    Every difference is listed, those that may legitimately exist (threads; runner and layers of a
    trainer and a worker) included.
    """
    left, right = _comparable(a), _comparable(b)
    absent = "absent"
    return _contract_lines(a, b) + [
        f"{key}: {left.get(key, absent)!r} != {right.get(key, absent)!r}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key, absent) != right.get(key, absent)
    ]


def _shared_differences(trainer: ConsistencyReport, worker: ConsistencyReport) -> list[str]:
    """What a trainer and a worker must have alike: contract, device, versions, binaries, weights.

    The contract already covers sources, schedules, toolchain and device; packages and binaries
    count where both sides name them.
    """
    lines = _contract_lines(trainer, worker)
    if trainer.device != worker.device:
        lines.append(f"device: {trainer.device!r} != {worker.device!r}")
    for field in ("packages", "binaries"):
        ours, theirs = getattr(trainer, field), getattr(worker, field)
        lines += [
            f"{field}.{name}: {ours[name]!r} != {theirs[name]!r}"
            for name in sorted(ours.keys() & theirs.keys())
            if ours[name] != theirs[name]
        ]
    versions = (trainer.weight_version, worker.weight_version)
    if None not in versions and versions[0] != versions[1]:
        lines.append(f"weight_version: {versions[0]} != {versions[1]}")
    return lines


def check_reports(
    trainer: ConsistencyReport, workers: Sequence[ConsistencyReport], *, served: bool = False
) -> None:
    """Raise one ContractMismatchError that lists everything that is wrong, on any process.

    Checked: each process alone (`problems`), each worker against the trainer (contract, device,
    packages, binaries, weight version), each worker against the first (every fact that may not
    differ).

    Args:
        served: whether both sides have run a forward since start-up.
    """
    lines = [] if workers else ["no worker reported: the plugin is not loaded in the engine"]
    lines += [f"{trainer.role}: {line}" for line in trainer.problems(served=served)]
    for worker in workers:
        lines += [f"{worker.role}: {line}" for line in worker.problems(served=served)]
        lines += [
            f"{trainer.role} and {worker.role}: {line}"
            for line in _shared_differences(trainer, worker)
        ]
    for worker in workers[1:]:
        lines += [
            f"{workers[0].role} and {worker.role}: {line}"
            for line in differences(workers[0], worker)
            if not line.startswith(_MAY_DIFFER)
        ]
    if lines:
        listed = "\n".join(f"  {i}. {line}" for i, line in enumerate(lines, start=1))
        raise ContractMismatchError(
            f"trainer and engine do not run the same thing; {len(lines)} difference(s):\n{listed}"
        )
