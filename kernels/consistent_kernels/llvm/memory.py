"""Large pages for what a kernel reads once a step: with small ones the page walks cost some 8%.

Where the system has none, memory is as it was: this moves no bit and is never needed.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

_PAGE = 2 << 20
_CHUNK = 64 << 20
_LINE = 64
_COLLAPSE = 25  # MADV_COLLAPSE, which Python does not name


class _Chunk:
    """One mapping, handed out from its beginning; it goes when the last tensor in it goes."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, size + _PAGE, flags=flags)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        skipped = -memory.data_ptr() % _PAGE
        self._memory = memory[skipped : skipped + size]
        self._used = 0
        advise(self._memory)

    def take(self, size: int) -> torch.Tensor | None:
        """Return so many bytes, or None where they do not fit."""
        if self._used + size > len(self._memory):
            return None
        start, self._used = self._used, self._used + -(-size // _LINE) * _LINE
        return self._memory[start : start + size]


class Arena:
    """Places tensors one behind the other in large pages."""

    def __init__(self) -> None:
        self._chunk: _Chunk | None = None

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of `tensor` in this arena; its place is never used again."""
        size = tensor.numel() * tensor.element_size()
        if not size:
            return tensor
        memory = None if self._chunk is None else self._chunk.take(size)
        if memory is None:
            self._chunk = _Chunk(max(_CHUNK, -(-size // _PAGE) * _PAGE))
            memory = self._chunk.take(size)
        assert memory is not None
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def advise(tensor: torch.Tensor) -> None:
    """Ask for large pages under a CPU tensor, whose contents stay."""
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    first = -(-begin // _PAGE) * _PAGE
    size = end // _PAGE * _PAGE - first
    if size <= 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    madvise = ctypes.CDLL(None).madvise
    # The first serves pages not touched yet, the second (Linux 6.1) the others. A refusal leaves
    # small pages.
    for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)
