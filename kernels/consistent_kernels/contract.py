"""Contracts: what every op of a model computes (spec) and how this machine computes it (program).

Engine and trainer each resolve a contract from the model's configuration; equal digests mean equal
formulas, rounding points, implementations, sources and toolchains. Bits are promised within one
program, never across devices or implementations.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from consistent_kernels.errors import ContractMismatchError, UnsupportedError

Scalar = str | int | bool | None


def float_bits(value: float) -> str:
    """Return the fp32 bit pattern of `value` as hex: constants are compared as bits."""
    return "0x" + struct.pack(">f", value).hex()


def _frozen(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(sorted(mapping.items())))


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """What an op computes, independent of any device.

    Attributes:
        op: the op's name, also its folder.
        version: bumped whenever a field changes; a frozen contract file pins it.
        fields: formula, rounding points, tie-breaks, constants.
    """

    op: str
    version: int
    fields: Mapping[str, Scalar]

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", _frozen(self.fields))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"version": self.version, "fields": dict(self.fields)}


@dataclasses.dataclass(frozen=True)
class Program:
    """How one run computes an op.

    Attributes:
        implementation: "reference", "onednn", "triton", ...
        source_sha256: hash over the implementation's source files.
        schedule: tiles, warps, reduction tree: everything pinned because it moves bits.
    """

    implementation: str
    source_sha256: str
    schedule: Mapping[str, Scalar]

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", _frozen(self.schedule))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "implementation": self.implementation,
            "source_sha256": self.source_sha256,
            "schedule": dict(self.schedule),
        }


@dataclasses.dataclass(frozen=True)
class Contract:
    """Spec and program of every op of one model on one kind of device; frozen and versioned."""

    name: str
    model: Mapping[str, Scalar]
    toolchain: Mapping[str, Scalar]
    specs: Mapping[str, OpSpec]
    programs: Mapping[str, Program]

    def __post_init__(self) -> None:
        for field in ("model", "toolchain", "specs", "programs"):
            object.__setattr__(self, field, _frozen(getattr(self, field)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, the form that is hashed."""
        return {
            "name": self.name,
            "model": dict(self.model),
            "toolchain": dict(self.toolchain),
            "specs": {op: spec.to_dict() for op, spec in self.specs.items()},
            "programs": {op: program.to_dict() for op, program in self.programs.items()},
        }

    @property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of specs, programs, model facts and toolchain."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def implementation(self, op: str) -> str:
        """Return the implementation chosen for `op`; the choice is made once, here."""
        if op not in self.programs:
            raise UnsupportedError(f"contract {self.name}", f"op {op!r}", self.programs)
        return self.programs[op].implementation

    def __reduce__(self) -> tuple[Any, ...]:
        # MappingProxyType does not pickle; workers receive contracts by value.
        return contract_from_dict, (self.to_dict(),)


def contract_from_dict(data: Mapping[str, Any]) -> Contract:
    """Rebuild a contract from `Contract.to_dict()`."""
    return Contract(
        name=data["name"],
        model=data["model"],
        toolchain=data["toolchain"],
        specs={op: OpSpec(op, s["version"], s["fields"]) for op, s in data["specs"].items()},
        programs={
            op: Program(p["implementation"], p["source_sha256"], p["schedule"])
            for op, p in data["programs"].items()
        },
    )


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    result: dict[str, Any] = {}
    for key, item in value.items():
        result.update(_leaves(item, f"{path}.{key}" if path else str(key)))
    return result


def differences(ours: Contract, theirs: Contract) -> list[str]:
    """Return one line per differing key, "key: ours != theirs"; empty when the digests agree."""
    a, b = _leaves(ours.to_dict()), _leaves(theirs.to_dict())
    absent = "absent"
    return [
        f"{key}: {a.get(key, absent)!r} != {b.get(key, absent)!r}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key, absent) != b.get(key, absent)
    ]


def check_same(ours: Contract, theirs: Contract, *, ours_is: str, theirs_is: str) -> None:
    """Raise ContractMismatchError listing both digests and every differing key."""
    if ours.digest == theirs.digest:
        return
    lines = "\n".join(f"  {line}" for line in differences(ours, theirs))
    raise ContractMismatchError(
        f"contract of {ours_is} ({ours.digest[:16]}) differs from that of {theirs_is} "
        f"({theirs.digest[:16]}):\n{lines}\nInstall the same versions and use the same device "
        "kind and model configuration on both sides."
    )
