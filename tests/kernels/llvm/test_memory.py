"""Large pages: tensors placed side by side keep their bytes and their chunk."""

from __future__ import annotations

import pytest
import torch

from consistent_kernels import llvm

if not llvm.is_available():
    pytest.skip("needs an x86-64 CPU with AVX2, and llvmlite", allow_module_level=True)

from consistent_kernels.linear import pack_weight
from consistent_kernels.linear.packing import packed_weight
from consistent_kernels.llvm import memory
from consistent_kernels.testing import assert_bitwise_equal, hazard_activations


def test_placed_tensors_keep_their_bytes() -> None:
    arena = memory.Arena()
    shapes = ((3, 5), (1000, 700), (1,), (1 << 25,), (40, 3), (0, 4))
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in shapes]
    placed = [arena.place(tensor) for tensor in tensors]
    for copy, tensor in zip(placed, tensors, strict=True):
        assert_bitwise_equal(copy, tensor)
        assert copy.data_ptr() % 64 == 0 or not tensor.numel()
    placed[0].fill_(1.0)
    for copy, tensor in zip(placed[1:], tensors[1:], strict=True):
        assert_bitwise_equal(copy, tensor)


def test_placed_tensors_outlive_their_arena() -> None:
    arena = memory.Arena()
    tensor = torch.arange(5000)
    placed = [arena.place(tensor) for _ in range(3)]
    del arena
    assert all(torch.equal(copy, tensor) for copy in placed)


def test_advice_keeps_contents() -> None:
    tensor = torch.randn(3 << 20, generator=torch.Generator().manual_seed(8))
    before = tensor.clone()
    memory.advise(tensor)
    memory.advise(tensor[:7])
    assert_bitwise_equal(tensor, before)


def test_a_lasting_copy_is_rebuilt_in_place() -> None:
    first, second = (hazard_activations((96, 64), seed=seed) for seed in (1, 2))
    lasting = pack_weight(first, impl="llvm", lasting=True)
    assert lasting is not None
    assert lasting.follows(first)
    address = packed_weight(lasting.number).data_ptr()
    lasting.rebuild(second)
    assert packed_weight(lasting.number).data_ptr() == address
    assert lasting.follows(second)
    assert not lasting.follows(first), "control"
