"""Weights in oneDNN's own layout beside the plain ones: the same bits, fewer passes over memory.

A packed tensor is opaque to PyTorch's tracing, so ops receive the number under which it is kept.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from consistent_kernels.linear.onednn import pack, packed_rows

_STORE: dict[int, torch.Tensor] = {}
_NUMBERS = itertools.count(1)


class PackedWeight:
    """A packed copy of one prepared weight; `rebuild` it whenever that changes.

    Attributes:
        number: of the copy, the same for the life of this object.
        columns, inner: N and K.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.number = next(_NUMBERS)
        self.columns, self.inner = weight.shape
        weakref.finalize(self, _STORE.pop, self.number, None)
        self.rebuild(weight)

    def rebuild(self, weight: torch.Tensor) -> None:
        """Pack `weight` [N, K] in the place of the old copy."""
        _STORE[self.number] = pack(weight.contiguous())

    def follows(self, weight: torch.Tensor) -> bool:
        """Return whether the copy holds the bytes of `weight`."""
        return torch.equal(
            packed_weight(self.number).to_dense().view(torch.int16), weight.view(torch.int16)
        )


def packed_weight(number: int) -> torch.Tensor:
    """Return the packed tensor of a `PackedWeight`'s number."""
    return _STORE[number]


def pack_weight(weight: torch.Tensor, *, impl: str) -> PackedWeight | None:
    """Return a packed copy where `impl` has one and a probe found the same bits, else None.

    Args:
        weight: [N, K], from `prepare_weight` with the same impl.
        impl: as in `linear`; only "onednn" packs, and only bf16 weights (lm_head's are fp32).
    """
    if impl != "onednn" or weight.dtype != torch.bfloat16:
        return None
    return PackedWeight(weight) if packed_rows(*weight.shape) else None
