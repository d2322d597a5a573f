"""Refuse an index that points outside, naming the first one: for programs that run on the host."""

from __future__ import annotations

import torch

from consistent_kernels.errors import invalid


def check_range(
    op: str, name: str, index: torch.Tensor, low: int, bound: int, what: str = "", hint: str = ""
) -> None:
    """Raise unless low <= every index < bound. Reads the values, so on a GPU it synchronizes.

    Args:
        op, name: of the operation and its argument.
        index: integers of any shape.
        low, bound: the smallest one allowed, and the first one that is too large.
        what: what an index may be, for the message; by default "from low to bound - 1".
        hint: what to do.

    Raises:
        InvalidInputError: names the first place and its value.
    """
    if index.numel() == 0:
        return
    wide = index.long()  # a bound may not fit into int32
    wrong = (wide < low) | (wide >= bound)
    if bool(wrong.any()):
        place = [int(i) for i in wrong.nonzero()[0]]
        expected = what or f"from {low} to {bound - 1}"
        given = int(index[tuple(place)])
        raise invalid(op, f"{name}[{', '.join(map(str, place))}]", expected, given, hint)
