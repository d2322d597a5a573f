"""Weights in the layout of a CPU's GEMM beside the plain ones: the same bits, laid out once.

A packed tensor is opaque to PyTorch's tracing, so ops receive the number under which it is kept.
"""

from __future__ import annotations

import functools
import itertools
import weakref

import torch

from consistent_kernels.linear import onednn
from consistent_kernels.llvm import memory

_STORE: dict[int, torch.Tensor] = {}
_NUMBERS = itertools.count(1)


@functools.cache
def _arena() -> memory.Arena:
    return memory.Arena()


class PackedWeight:
    """A packed copy of one prepared weight; `rebuild` it whenever that changes.

    Args:
        weight: [N, K].
        impl: the implementation that reads the copy.
        lasting: it is read step by step and not made anew: it goes to large pages.

    Attributes:
        number: of the copy, the same for the life of this object.
        columns, inner: N and K.
        impl: the implementation that reads it.
    """

    def __init__(self, weight: torch.Tensor, impl: str, lasting: bool = False) -> None:
        self.number = next(_NUMBERS)
        self.impl = impl
        self._lasting = lasting
        self.columns, self.inner = weight.shape
        weakref.finalize(self, _STORE.pop, self.number, None)
        self.rebuild(weight)

    def rebuild(self, weight: torch.Tensor) -> None:
        """Pack `weight` [N, K] in the place of the old copy."""
        if self.impl == "llvm":
            from consistent_kernels.linear import llvm

            with torch.inference_mode(False), torch.no_grad():
                packed = llvm.pack(weight)
                if self.number in _STORE:
                    # A list of kernel calls may hold the address.
                    _STORE[self.number].copy_(packed)
                else:
                    _STORE[self.number] = _arena().place(packed) if self._lasting else packed
        else:
            _STORE[self.number] = onednn.pack(weight.contiguous())

    def follows(self, weight: torch.Tensor) -> bool:
        """Return whether the copy holds the bytes of `weight`."""
        copy = packed_weight(self.number)
        if self.impl == "llvm":
            from consistent_kernels.linear import llvm

            plain = llvm.unpack(copy, self.columns, self.inner)
        else:
            plain = copy.to_dense()
        return torch.equal(plain.view(torch.int16), weight.view(torch.int16))


def packed_weight(number: int) -> torch.Tensor:
    """Return the packed tensor of a `PackedWeight`'s number."""
    return _STORE[number]


def pack_weight(weight: torch.Tensor, *, impl: str, lasting: bool = False) -> PackedWeight | None:
    """Return a packed copy where `impl` has one and a probe found the same bits, else None.

    Args:
        weight: [N, K], from `prepare_weight` with the same impl.
        impl: as in `linear`; only "llvm" and "onednn" pack, and only bf16 weights (those of
            lm_head are fp32 in "onednn").
        lasting: as in `PackedWeight`.
    """
    if impl not in ("llvm", "onednn") or weight.dtype != torch.bfloat16:
        return None
    if impl == "onednn" and not onednn.packed_rows(*weight.shape):
        return None
    return PackedWeight(weight, impl, lasting)
