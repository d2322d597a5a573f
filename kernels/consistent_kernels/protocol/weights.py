"""Weight digests that add up over shards, and the receipt an engine gives for an update.

The digest of a parameter [R, C] is sum over (r, c) of row_key(r) * column_key(c) * bits(r, c)
mod 2^64, bits being the bf16 cast as a signed 16-bit integer (exact for FP8 values; of FP8 scales
all 32 bits count) and the keys odd pseudo-random 64-bit integers. So one changed element always
changes the digest (an odd number times less than 2^33 is not 0 mod 2^64), two changes cancel with a
chance near 2^-48 (scales: 2^-31), and the sums of row or column ranges add up to the whole: shards
are digested where they lie, and a slice of a fused tensor has the digest of the parameter it holds.
It finds mistakes; it is not proof against an adversary.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from consistent_kernels.errors import StaleWeightsError, invalid
from consistent_kernels.quantization.parameters import SCALE_SUFFIX

_CHUNK_ELEMENTS = {"cpu": 1 << 15}
"""Elements held as int64 at once. On a CPU the passes stay in cache, and up to ATen's grain of
32768 an op runs on the calling thread: no barrier stalls on a busy machine."""
_DEVICE_CHUNK_ELEMENTS = 1 << 24

_ROW_SEED, _COLUMN_SEED = 0x1B873593, 0x2545F491
_MODULUS = 1 << 64
_LISTED = 5


def _signed(value: int) -> int:
    return value - _MODULUS if value >= 1 << 63 else value


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask makes it a logical shift.
    return (x >> by) & ((1 << (64 - by)) - 1)


def _keys(start: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit keys of the indices [start, start + count): splitmix64 of (index, seed)."""
    x = torch.arange(start, start + count, dtype=torch.int64, device=device)
    x = (x + seed) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift_right(x, 31)) | 1


def _bits(tensor: torch.Tensor, exact: bool) -> tuple[torch.Tensor, int]:
    """Return the bits that count as signed integers, and the mask of the exponent in them."""
    if exact:
        return tensor.float().contiguous().view(torch.int32), 0x7F800000
    return tensor.to(torch.bfloat16).contiguous().view(torch.int16), 0x7F80


def _sums(
    tensor: torch.Tensor, row_start: int, column_start: int, exact: bool = False
) -> torch.Tensor:
    """[2] int64 on the tensor's device: (digest, number of non-finite elements)."""
    tensor = tensor.detach()
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    rows = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
    row_keys = _keys(row_start, rows.shape[0], _ROW_SEED, rows.device)
    column_keys = _keys(column_start, rows.shape[1], _COLUMN_SEED, rows.device)
    limit = _CHUNK_ELEMENTS.get(rows.device.type, _DEVICE_CHUNK_ELEMENTS)
    step = max(1, limit // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        bits, exponent = _bits(rows[start : start + step], exact)
        weighted = bits.to(torch.int64).mul_(column_keys).sum(-1)
        total[0] += weighted.mul_(row_keys[start : start + step]).sum()
        total[1] += ((bits & exponent) == exponent).sum()
    return total


@dataclasses.dataclass(frozen=True)
class TensorDigest:
    """Digest of a parameter, or of a part of one.

    Attributes:
        value: in [0, 2^64).
        elements: how many elements it covers.
        nonfinite: how many of them are NaN or infinite in bf16.
    """

    value: int
    elements: int
    nonfinite: int

    def __add__(self, other: TensorDigest) -> TensorDigest:
        """Digest of two disjoint parts together."""
        return TensorDigest(
            (self.value + other.value) % _MODULUS,
            self.elements + other.elements,
            self.nonfinite + other.nonfinite,
        )


def tensor_digest(
    tensor: torch.Tensor, *, row_start: int = 0, column_start: int = 0
) -> TensorDigest:
    """Digest the bf16 cast of `tensor`, on its device.

    Args:
        tensor: a parameter, or a shard of one: fp32 master, bf16 copy, or fp32 holding bf16
            values give the same digest. The first dimension is rows, the others together columns;
            a 1-D tensor is one column. Strided views are fine.
        row_start, column_start: where the shard begins in the whole parameter.
    """
    if not tensor.is_floating_point():
        raise invalid("tensor_digest", "tensor", "floating point", tensor.dtype)
    value, nonfinite = _sums(tensor, row_start, column_start).tolist()
    return TensorDigest(value % _MODULUS, tensor.numel(), nonfinite)


@dataclasses.dataclass(frozen=True)
class WeightDigest:
    """Digests of all parameters by Hugging Face name; immutable."""

    tensors: Mapping[str, TensorDigest]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(sorted(self.tensors.items()))))

    @property
    def total(self) -> str:
        """SHA-256 over names, digests and sizes."""
        entries = {name: [d.value, d.elements] for name, d in self.tensors.items()}
        return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()

    @property
    def parameters(self) -> int:
        """Number of elements over all names."""
        return sum(digest.elements for digest in self.tensors.values())

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """Names of parameters that hold NaN or infinity in bf16."""
        return tuple(name for name, digest in self.tensors.items() if digest.nonfinite)

    def differences(self, other: WeightDigest) -> list[str]:
        """Return the names that are absent on one side or differ, in order; empty when equal."""
        names = self.tensors.keys() | other.tensors.keys()
        return sorted(n for n in names if self.tensors.get(n) != other.tensors.get(n))

    def __add__(self, other: WeightDigest) -> WeightDigest:
        """Digest of two shards of a model together, name by name."""
        merged = dict(self.tensors)
        for name, digest in other.tensors.items():
            merged[name] = merged[name] + digest if name in merged else digest
        return WeightDigest(merged)

    def to_dict(self) -> dict[str, Any]:
        """Return {name: [hex value, elements, nonfinite]}."""
        return {
            name: [f"{d.value:016x}", d.elements, d.nonfinite] for name, d in self.tensors.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WeightDigest:
        """Rebuild from `to_dict()`."""
        return cls({name: TensorDigest(int(v, 16), n, bad) for name, (v, n, bad) in data.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightDigest.from_dict, (self.to_dict(),)


def state_digest(
    named: Iterable[tuple[str, torch.Tensor]],
    rows: Mapping[str, tuple[int, int]] | None = None,
) -> WeightDigest:
    """Digest named parameters, with one wait for the device for all of them.

    Args:
        rows: names of which the tensor holds the rows [start, stop) of the parameter alone.
        named: (Hugging Face name, whole tensor) pairs. Slices of a fused tensor go in under the
            names of the parameters they hold; a name given twice is an error. Of a name that ends
            in "_scale_inv" (scales of FP8 weights) all 32 bits count.
    """
    sums: dict[str, torch.Tensor] = {}
    elements: dict[str, int] = {}
    for name, tensor in named:
        if name in sums:
            raise invalid("state_digest", "named", "of unique names", f"{name} twice")
        if not tensor.is_floating_point():
            raise invalid("state_digest", name, "floating point", tensor.dtype)
        exact = name.endswith(SCALE_SUFFIX)
        start = rows[name][0] if rows and name in rows else 0
        sums[name], elements[name] = _sums(tensor, start, 0, exact), tensor.numel()
    digests = {}
    for device in {part.device for part in sums.values()}:
        names = [name for name, part in sums.items() if part.device == device]
        values = torch.stack([sums[name] for name in names]).tolist()
        for name, (value, nonfinite) in zip(names, values, strict=True):
            digests[name] = TensorDigest(value % _MODULUS, elements[name], nonfinite)
    return WeightDigest(digests)


@dataclasses.dataclass(frozen=True)
class WeightReceipt:
    """What a side says about the weights it holds.

    Attributes:
        version: the trainer's counter of optimizer steps at which these weights were taken.
        digest: of every parameter.
        contract_digest: digest of the contract under which they are served.
        rows: parameters of which this side holds the rows [start, stop) alone, and `digest` covers
            no others: the experts of one rank of several.
    """

    version: int
    digest: WeightDigest
    contract_digest: str
    rows: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of elements over all parameters."""
        return self.digest.parameters

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """Names of parameters that hold NaN or infinity in bf16."""
        return self.digest.nonfinite

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types; `total`, `parameters` and `nonfinite` are there to be read."""
        return {
            "version": self.version,
            "contract_digest": self.contract_digest,
            "total": self.digest.total,
            "parameters": self.parameters,
            "nonfinite": list(self.nonfinite),
            "digest": self.digest.to_dict(),
            "rows": {name: list(held) for name, held in self.rows.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WeightReceipt:
        """Rebuild from `to_dict()`."""
        digest = WeightDigest.from_dict(data["digest"])
        if digest.total != data["total"]:
            raise invalid("WeightReceipt", "total", digest.total, data["total"], "It was altered")
        rows = {name: (start, stop) for name, (start, stop) in data.get("rows", {}).items()}
        return cls(data["version"], digest, data["contract_digest"], rows)


def check_receipt(receipt: WeightReceipt, expected: WeightReceipt) -> None:
    """Raise StaleWeightsError unless both sides hold the same weights under the same contract.

    The text names the two versions, the contracts, or the first differing parameters.
    """
    problems = []
    if receipt.version != expected.version:
        problems.append(f"version {receipt.version} is served, {expected.version} is expected")
    if receipt.contract_digest != expected.contract_digest:
        problems.append(
            f"contract {receipt.contract_digest[:16]} is served, "
            f"{expected.contract_digest[:16]} is expected"
        )
    names = receipt.digest.differences(expected.digest)
    if names:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        listed = "; ".join(_difference(name, receipt, expected) for name in names[:_LISTED])
        problems.append(f"{len(names)} parameter(s) differ: {listed}{more}")
    if problems:
        raise StaleWeightsError(
            "weights are not the expected ones: "
            + "; ".join(problems)
            + ". Push the weights again "
            "and sample only after the receipt agrees"
        )


def _difference(name: str, receipt: WeightReceipt, expected: WeightReceipt) -> str:
    served = receipt.digest.tensors.get(name)
    wanted = expected.digest.tensors.get(name)
    if served is None:
        return f"{name} is not served"
    if wanted is None:
        return f"{name} is not expected"
    if served.elements != wanted.elements:
        return f"{name} has {served.elements} elements, expected {wanted.elements}"
    return f"{name} ({served.value:016x} != {wanted.value:016x})"
