"""Ways to run one op at one shape, of which one is the committed one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Group:
    """Calls that do the same work and take turns.

    Attributes:
        op, shape: as in `benchmarks/ops`.
        variants: by name; each returns its result, or changes what `state` returns.
        chosen: the committed one among them.
        stock: stock's kernels for the work, by name.
        state: tensors that a call changes.
        expected: leading rows of the result, by the reference; None compares the variants alone.
        rows: by the names of `variants`, the result for some of the rows.
        counts: how many rows at once `rows` is asked for, to be compared with all of them.
    """

    op: str
    shape: str
    variants: Mapping[str, Callable[[], Any]]
    chosen: str
    stock: Mapping[str, Callable[[], Any]]
    state: Callable[[], Any] = lambda: ()
    expected: torch.Tensor | None = None
    rows: Mapping[str, Callable[[slice], Any]] = dataclasses.field(default_factory=dict)
    counts: Sequence[int] = ()

    def result(self, name: str) -> list[torch.Tensor]:
        """Return the bytes that a variant gives, as copies."""
        return [*_bytes(self.variants[name]()), *_bytes(self.state())]

    def same(self, name: str, first: list[torch.Tensor]) -> bool:
        """Say whether a variant gives the bytes of the chosen one, and the reference's."""
        got = self.result(name)
        if not got or not all(torch.equal(a, b) for a, b in zip(got, first, strict=True)):
            return False
        if self.expected is None:
            return True
        rows = self.variants[name]()[: len(self.expected)]
        return torch.equal(rows.cpu(), self.expected)

    def keeps_rows(self, name: str) -> bool | None:
        """Say whether fewer rows at once have the bytes of all; None where that is not asked."""
        if name not in self.rows or not self.counts:
            return None
        run, (whole,) = self.rows[name], self.result(name)
        for count in self.counts:
            for first in {0, len(whole) - count}:
                (part,) = _bytes(run(slice(first, first + count)))
                if not torch.equal(part, whole[first : first + count]):
                    return False
        return True


def _bytes(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.contiguous().view(torch.uint8).clone()
        return
    for part in value or ():
        yield from _bytes(part)
